"""The laws of a scorer."""

from collections.abc import Mapping
from typing import ClassVar

import attrs
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from qevict.contracts.scorer import Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.testing.contract import RegisteredContract, law, plain_law
from qevict.testing.operators import Operators
from qevict.testing.values import (
    Finding,
    ValueT,
    close,
    copied,
    gap,
    map_tensors,
    moved,
    normal,
    require,
    same_bits,
    same_values,
    uniform,
)

WINDOW, HEAD_DIM, GROUP = 4, 8, 2


@attrs.frozen
class ScorerCase:
    """Some forwards over windows that are all there from the beginning, in lanes of their own.

    Attributes:
        lanes: lanes of the layer.
        heads: KV heads of one lane; twice as many query heads.
        windows: windows of every lane.
        forwards: forwards before the windows are ranked.
        tokens: new tokens of each forward.
        dtype: dtype of the model.
        seed: decides the numbers.
    """

    lanes: int
    heads: int
    windows: int
    forwards: int
    tokens: int
    dtype: torch.dtype
    seed: int

    def windows_now(self) -> Windows:
        """The windows, each lane with gaps of its own, in ascending position."""
        steps = 1 + (3 * uniform(self.seed, self.lanes, self.windows)).long()
        everywhere = torch.ones(self.lanes, self.windows, dtype=torch.bool)
        places = torch.zeros(self.lanes, self.windows, dtype=torch.int64)
        positions, counts = 1 + WINDOW * steps.cumsum(1), (self.windows,) * self.lanes
        lengths = positions[:, -1] + WINDOW
        return Windows(positions, everywhere, everywhere, places, counts, lengths=lengths)

    def observations(self, scorer: Scorer) -> list[Observation]:
        """What the forwards show, the first of them a prompt; nothing but what a scorer needs.

        With ``observe_tokens``, a scorer that needs more than masses sees forwards without masses between the others.
        """
        prompt, later = float(scorer.prompt_stride), 1.0 if scorer.observe_tokens is None else 2.0
        seen = [self._observation(self.seed + 7 * number, scorer.needs) for number in range(self.forwards)]
        told = [attrs.evolve(each, stands_for=later if number else prompt) for number, each in enumerate(seen)]
        if scorer.observe_tokens is None or scorer.needs == {Need.MASS}:
            return told
        return [attrs.evolve(each, mass=None) if number % 2 else each for number, each in enumerate(told)]

    def _observation(self, seed: int, needs: frozenset[Need]) -> Observation:
        mass = uniform(seed, self.lanes, self.heads * GROUP, self.windows)
        vectors = (self.lanes, self.heads, self.tokens, HEAD_DIM)
        drawn = uniform(seed + 1, self.lanes, self.tokens) * (self.windows + 1)
        return Observation(
            columns=drawn.long().clamp(max=self.windows) - 1,
            windows=self.windows,
            mass=mass if Need.MASS in needs else None,
            keys=normal(seed + 2, *vectors).to(self.dtype) if Need.KEYS in needs else None,
            values=normal(seed + 3, *vectors).to(self.dtype) if Need.VALUES in needs else None,
        )


SCORER_CASES = st.builds(
    ScorerCase,
    lanes=st.integers(1, 3),
    heads=st.integers(1, 2),
    windows=st.integers(1, 5),
    forwards=st.integers(1, 3),
    tokens=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)


class ScorerContract(RegisteredContract[Scorer, ScorerCase]):
    """The laws of a scorer. One line makes them tests of yours.

    An observation shows what the scorer ``needs`` and nothing else.

    Example:
        ```python
        from qevict.scorers.cumulative import CumulativeAttention
        from qevict.testing import ScorerContract


        class TestCumulativeAttention(ScorerContract):
            part = CumulativeAttention()
        ```
    """

    kind: ClassVar[type] = Scorer

    def cases(self) -> SearchStrategy[ScorerCase]:
        """Up to three lanes, five windows and three forwards, in all dtypes of models."""
        return SCORER_CASES

    @plain_law(
        "needs is a set of Need, prompt_queries and observe_tokens are None (all) or at least 1, prompt_stride is too."
    )
    def test_it_declares_what_it_wants_to_see(self) -> None:
        needs = self.part.needs
        require(isinstance(needs, frozenset) and all(isinstance(each, Need) for each in needs), f"needs is {needs!r}")
        require(_is_count(self.part.prompt_stride), f"prompt_stride is {self.part.prompt_stride!r}")
        for name in ("prompt_queries", "observe_tokens"):
            count = getattr(self.part, name)
            require(count is None or _is_count(count), f"{name} is {count!r}")

    @law("needs names all that update reads from an observation; nothing else is computed.")
    def test_it_reads_only_what_it_declares(self, case: ScorerCase) -> None:
        state = self._start(case)
        try:
            for seen in self._observations(case):
                state = self.part.update(state, seen)
        except Exception as error:
            shown = ", ".join(sorted(str(each) for each in self.part.needs)) or "nothing"
            shown += "" if self.part.observe_tokens is None else " (no masses where observe_tokens leaves them out)"
            raise Finding(f"shown {shown}, update raised {type(error).__name__}: {error}") from error

    @law("Pure: neither the state nor the observation is changed.")
    def test_it_changes_nothing_that_it_is_given(self, case: ScorerCase) -> None:
        state, windows = self._start(case), moved(case.windows_now(), self.device)
        for seen in self._observations(case):
            before = copied(state), copied(seen)
            later = self.part.update(state, seen)
            require(same_values(state, before[0]), "update changed the state it was given; return a new one")
            require(same_values(seen, before[1]), "update changed the observation it was given")
            state = later
        before_ranking = copied(state), copied(windows)
        self.part.rank(state, windows)
        require(same_values(state, before_ranking[0]), "rank changed the state it was given")
        require(same_values(windows, before_ranking[1]), "rank changed the windows it was given")

    @law("Pure: equal input, equal output.")
    def test_it_says_the_same_again(self, case: ScorerCase) -> None:
        first, again = self._rankings(self.part, case), self._rankings(self.part, case)
        require(self._equal(first, again), "asked again, it ranks otherwise")
        require(self._equal(first, self._rankings(self.twin(), case)), "an equal scorer ranks otherwise")

    @law("fp32, whatever dtype the model computes in.")
    def test_states_and_rankings_are_fp32(self, case: ScorerCase) -> None:
        state = self._state(case)
        for name, array in [*self._start(case).items(), *state.items()]:
            require(array.dtype == torch.float32, f"state {name!r} is {array.dtype}")
        for name, ranking in self.part.rank(state, moved(case.windows_now(), self.device)).items():
            require(ranking.dtype == torch.float32, f"ranking {name!r} is {ranking.dtype}")

    @law("A state has leading axes [lanes, windows] and keeps its form; rankings are [lanes, windows], at least one.")
    def test_states_and_rankings_have_their_axes(self, case: ScorerCase) -> None:
        axes, start, state = (case.lanes, case.windows), self._start(case), self._state(case)
        require(start.keys() == state.keys(), f"update turned the state {sorted(start)} into {sorted(state)}")
        for name, array in start.items():
            require(array.shape[:2] == axes, f"state {name!r} is {tuple(array.shape)} for [lanes, windows] = {axes}")
            shape = tuple(state[name].shape)
            require(shape == array.shape, f"update turned state {name!r} from {tuple(array.shape)} into {shape}")
        rankings = self.part.rank(state, moved(case.windows_now(), self.device))
        require(len(rankings) > 0, "it returned no ranking; return at least {'importance': ...}")
        for name, ranking in rankings.items():
            require(ranking.shape == axes, f"ranking {name!r} is {tuple(ranking.shape)} for [lanes, windows] = {axes}")

    @law("Windows that nothing was observed of are alike, however many start together, none included.")
    def test_every_window_starts_alike(self, case: ScorerCase) -> None:
        one, many, none = (self.part.start(1, 1, self.device), self._start(case), self.part.start(1, 0, self.device))
        require(one.keys() == many.keys() == none.keys(), "a state has other names for another number of windows")
        for name, array in many.items():
            alike = one[name].expand_as(array)
            require(same_bits(array, alike), f"state {name!r} starts unlike a lone window: {gap(array, alike)}")
            require(none[name].shape[:2] == (1, 0), f"state {name!r} of no windows is {tuple(none[name].shape)}")

    @law("Lanes are strangers: a lane's scores depend on that lane alone.")
    def test_a_lane_scores_alone_as_among_others(self, case: ScorerCase) -> None:
        together = self._rankings(self.part, case)
        for lane in range(case.lanes):
            state = self.part.start(1, case.windows, self.device)
            for seen in self._observations(case):
                state = self.part.update(state, _of_lane(seen, lane))
            alone = self.part.rank(state, _of_lane(moved(case.windows_now(), self.device), lane))
            for name, ranking in together.items():
                among = ranking[lane : lane + 1]
                require(close(among, alone[name]), f"lane {lane} by {name!r}, among others: {gap(among, alone[name])}")

    @law("Results depend on a window's position and history, never on its column or storage slot.")
    def test_the_order_of_columns_means_nothing(self, case: ScorerCase) -> None:
        """Columns are shuffled anew before each forward, each lane by itself; the state moves with them."""
        state, now = self._start(case), torch.arange(case.windows).expand(case.lanes, -1)
        for number, seen in enumerate(case.observations(self.part)):
            order = uniform(case.seed + number, case.lanes, case.windows).argsort(dim=1)
            move = now.argsort(dim=1).gather(1, order)
            state = {name: _take(array, move.to(self.device)) for name, array in state.items()}
            state, now = self.part.update(state, moved(_shuffled(seen, order), self.device)), order
        expected, windows = self._rankings(self.part, case), case.windows_now()
        shuffled = attrs.evolve(windows, positions=windows.positions.gather(1, now))
        for name, ranking in self.part.rank(state, moved(shuffled, self.device)).items():
            wanted = expected[name].gather(1, now.to(self.device))
            require(close(ranking, wanted), f"shuffled, {name!r} differs: {gap(ranking, wanted)}")

    @law("Absent columns are ignored.")
    def test_absent_columns_change_nothing(self, case: ScorerCase) -> None:
        """One column more, that nothing was observed of and that claims a far position."""
        wider = attrs.evolve(case, windows=case.windows + 1)
        state, windows = self.part.start(case.lanes, wider.windows, self.device), case.windows_now()
        for seen in case.observations(self.part):
            state = self.part.update(state, moved(_with_filler(seen), self.device))
        far, no = torch.full((case.lanes, 1), 900), torch.zeros(case.lanes, 1, dtype=torch.bool)
        present = torch.cat((windows.present, no), dim=1)
        positions, place = torch.cat((windows.positions, far), dim=1), torch.cat((windows.place, far * 0 - 1), dim=1)
        filled = Windows(positions, present, present, place, windows.candidates, lengths=windows.lengths)
        expected = self._rankings(self.part, case)
        for name, ranking in self.part.rank(state, moved(filled, self.device)).items():
            kept = ranking[:, :-1]
            require(close(kept, expected[name]), f"beside filler, {name!r} differs: {gap(kept, expected[name])}")

    @law("No host synchronisation (no .item(), nonzero or boolean indexing).")
    def test_the_host_never_waits(self, case: ScorerCase) -> None:
        seen, windows = self._observations(case), moved(case.windows_now(), self.device)
        with Operators() as operators:
            state = self._start(case)
            for each in seen:
                state = self.part.update(state, each)
            self.part.rank(state, windows)
        require(not operators.waits, f"it waits for the device: {', '.join(sorted(operators.waits))}")

    def _start(self, case: ScorerCase) -> State:
        return self.part.start(case.lanes, case.windows, self.device)

    def _observations(self, case: ScorerCase) -> list[Observation]:
        return moved(case.observations(self.part), self.device)

    def _state(self, case: ScorerCase) -> State:
        state = self._start(case)
        for seen in self._observations(case):
            state = self.part.update(state, seen)
        return state

    def _rankings(self, scorer: Scorer, case: ScorerCase) -> Mapping[str, Tensor]:
        state = scorer.start(case.lanes, case.windows, self.device)
        for seen in self._observations(case):
            state = scorer.update(state, seen)
        return copied(scorer.rank(state, moved(case.windows_now(), self.device)))

    def _equal(self, left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
        if self.device.type == "cpu":
            return same_values(left, right)
        return left.keys() == right.keys() and all(close(left[name], right[name]) for name in left)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _of_lane(value: ValueT, lane: int) -> ValueT:
    """What an observation, or a rectangle of windows, says of one lane."""
    alone = map_tensors(lambda tensor: tensor[lane : lane + 1], value)
    if isinstance(alone, Windows):
        return attrs.evolve(alone, candidates=alone.candidates[lane : lane + 1])
    return alone


def _take(array: Tensor, index: Tensor) -> Tensor:
    """Columns of each lane in another order."""
    return array[torch.arange(len(index), device=array.device)[:, None], index]


def _shuffled(seen: Observation, order: Tensor) -> Observation:
    """The same observation of windows in other columns: column ``i`` of a lane is what was column ``order[i]``."""
    columns = seen.columns
    there = order.argsort(dim=1).gather(1, columns.clamp(min=0))
    columns = torch.where(columns < 0, -1, there)
    mass = seen.mass
    if mass is not None:
        mass = mass.gather(2, order[:, None].expand_as(mass))
    return attrs.evolve(seen, columns=columns, mass=mass)


def _with_filler(seen: Observation) -> Observation:
    """The same observation with one more column, that nothing fell into."""
    mass = None if seen.mass is None else torch.nn.functional.pad(seen.mass, (0, 1))
    return attrs.evolve(seen, windows=seen.windows + 1, mass=mass)
