"""The laws of a scorer."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from qevict.contracts.scorer import Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.testing.contract import Capability, RegisteredContract, law, plain_law
from qevict.testing.observing import SCORER_CASES, ScorerCase
from qevict.testing.operators import Operators
from qevict.testing.rearranging import (
    filled,
    observed_lane,
    observed_row,
    shuffled,
    shuffled_windows,
    taken,
    windows_of,
    with_filler,
)
from qevict.testing.values import Finding, close, copied, gap, moved, require, same_bits, same_values, uniform

STRANGERS = Capability(
    lambda part: not (isinstance(part, Scorer) and part.lanes_share_row), "declares lanes_share_row = True"
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
        """Up to two rows of two lanes, five windows and four forwards, in all dtypes of models."""
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

    @law("Rows are strangers: a row's scores depend on that row alone.")
    def test_a_row_scores_alone_as_among_others(self, case: ScorerCase) -> None:
        together, shown = self._rankings(self.part, case), self._observations(case)
        for row in range(case.rows):
            first = row * case.lanes_per_row
            seen = [observed_row(each, row) for each in shown]
            lanes = slice(first, first + case.lanes_per_row)
            _same(self._alone(case, seen, lanes), _lanes_of(together, lanes), f"row {row}, among others")

    @law(
        "Lanes are strangers, unless ``lanes_share_row``: a lane's scores depend on that lane alone.",
        given_that=STRANGERS,
    )
    def test_a_lane_scores_alone_as_among_others(self, case: ScorerCase) -> None:
        together, shown = self._rankings(self.part, case), self._observations(case)
        for lane in range(case.lanes):
            seen = [observed_lane(each, lane) for each in shown]
            lanes = slice(lane, lane + 1)
            _same(self._alone(case, seen, lanes), _lanes_of(together, lanes), f"lane {lane}, among others")

    @law("Results depend on a window's position and history, never on its column or storage slot.")
    def test_the_order_of_columns_means_nothing(self, case: ScorerCase) -> None:
        """Columns are shuffled anew before each forward, each lane by itself; the state moves with them."""
        state, now = self._start(case), torch.arange(case.windows).expand(case.lanes, -1)
        for number, seen in enumerate(case.observations(self.part)):
            order = uniform(case.seed + number, case.lanes, case.windows).argsort(dim=1)
            move = now.argsort(dim=1).gather(1, order)
            state = {name: taken(array, move.to(self.device)) for name, array in state.items()}
            state, now = self.part.update(state, moved(shuffled(seen, order), self.device)), order
        windows = moved(shuffled_windows(case.windows_now(), now), self.device)
        found = _on_candidates(self.part.rank(state, windows), windows)
        expected = self._rankings(self.part, case).items()
        _same(found, {name: each.gather(1, now.to(self.device)) for name, each in expected}, "shuffled")

    @law("Absent columns are ignored.")
    def test_absent_columns_change_nothing(self, case: ScorerCase) -> None:
        """One column more, that nothing was observed of and that claims a far position."""
        state, windows = self.part.start(case.lanes, case.windows + 1, self.device), case.windows_now()
        for seen in case.observations(self.part):
            state = self.part.update(state, moved(with_filler(seen), self.device))
        found = _on_candidates(self.part.rank(state, moved(filled(windows), self.device)), windows)
        _same(found, self._rankings(self.part, case), "beside filler")

    @law("What an observation says to mean nothing (tokens not written, queries not asked for) changes nothing.")
    def test_what_means_nothing_changes_nothing(self, case: ScorerCase) -> None:
        """The numbers that stand there are zeros first, and no numbers then."""
        expected, state = self._rankings(self.part, case), self._start(case)
        for seen in moved(case.observations(self.part, nothing=torch.nan), self.device):
            state = self.part.update(state, seen)
        _same(self._rank(self.part, case, state), expected, "with NaN there")

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
        return self._rank(scorer, case, state)

    def _rank(self, scorer: Scorer, case: ScorerCase, state: State) -> Mapping[str, Tensor]:
        """Rankings, where they mean something."""
        windows = moved(case.windows_now(), self.device)
        return _on_candidates(scorer.rank(state, windows), windows)

    def _alone(self, case: ScorerCase, seen: list[Observation], lanes: slice) -> Mapping[str, Tensor]:
        """Rankings of some lanes by what was shown of them."""
        state = self.part.start(lanes.stop - lanes.start, case.windows, self.device)
        for each in seen:
            state = self.part.update(state, each)
        windows = moved(windows_of(case.windows_now(), lanes), self.device)
        return _on_candidates(self.part.rank(state, windows), windows)

    def _equal(self, left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
        if self.device.type == "cpu":
            return same_values(left, right)
        return left.keys() == right.keys() and all(close(left[name], right[name]) for name in left)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _lanes_of(rankings: Mapping[str, Tensor], lanes: slice) -> Mapping[str, Tensor]:
    return {name: ranking[lanes] for name, ranking in rankings.items()}


def _on_candidates(rankings: Mapping[str, Tensor], windows: Windows) -> Mapping[str, Tensor]:
    """Rankings of these windows, where they mean something."""
    width, others = windows.candidate.shape[1], ~windows.candidate
    return {name: each[:, :width].masked_fill(others.to(each.device), 0) for name, each in rankings.items()}


def _same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> None:
    for name, ranking in found.items():
        require(close(ranking, wanted[name]), f"{where}, {name!r} differs: {gap(ranking, wanted[name])}")
