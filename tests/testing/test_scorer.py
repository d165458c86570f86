"""Each law of scorers is broken by some scorer, and the kit says so."""

from collections.abc import Mapping

import attrs
import pytest
import torch
from tests.breaking import Break, breaks, laws_of, passes, report
from torch import Tensor

from qevict.contracts.scorer import IMPORTANCE, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.scorers.cumulative import CumulativeAttention
from qevict.testing import ScorerContract
from qevict.testing.observing import ScorerCase


@attrs.frozen
class Unchecked(CumulativeAttention):
    needs = frozenset({"mass"})  # type: ignore[arg-type]


@attrs.frozen
class AtEveryNone(CumulativeAttention):
    prompt_stride: int = 0


@attrs.frozen
class AlwaysWantsMasses(CumulativeAttention):
    """Needs values too, and so is shown the forwards that it left out."""

    needs = frozenset({Need.MASS, Need.VALUES})


@attrs.frozen
class ReadsKeys(CumulativeAttention):
    def update(self, state: State, observation: Observation) -> State:
        assert observation.keys is not None
        return state


@attrs.frozen
class AddsInPlace(CumulativeAttention):
    def update(self, state: State, observation: Observation) -> State:
        assert observation.mass is not None
        state["mass"].add_(observation.mass.mean(dim=1))
        return state


@attrs.frozen
class ScalesTheObservation(CumulativeAttention):
    def update(self, state: State, observation: Observation) -> State:
        assert observation.mass is not None
        return {"mass": state["mass"] + observation.mass.mul_(0.5).sum(dim=1)}


@attrs.frozen
class SortsPositions(CumulativeAttention):
    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        windows.positions.neg_()
        return {IMPORTANCE: state["mass"]}


@attrs.frozen(eq=False)
class Remembers(CumulativeAttention):
    calls: list[int] = attrs.field(factory=list, repr=False)

    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        self.calls.append(1)
        return {IMPORTANCE: state["mass"] + len(self.calls)}


@attrs.frozen
class Double(CumulativeAttention):
    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        return {IMPORTANCE: state["mass"].double()}


@attrs.frozen
class Half(CumulativeAttention):
    def update(self, state: State, observation: Observation) -> State:
        return {name: array.half() for name, array in super().update(state, observation).items()}


@attrs.frozen
class InTheKeysDtype(CumulativeAttention):
    """Right in fp32, wrong for every other model."""

    needs = frozenset({Need.KEYS})

    def update(self, state: State, observation: Observation) -> State:
        assert observation.keys is not None
        return {"mass": (state["mass"] + observation.keys.mean()).to(observation.keys.dtype)}


@attrs.frozen
class OneScoreForAll(CumulativeAttention):
    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        return {IMPORTANCE: state["mass"].mean(dim=1, keepdim=True)}


@attrs.frozen
class Silent(CumulativeAttention):
    def rank(self, state: State, windows: Windows) -> Mapping[str, Tensor]:  # type: ignore[override]
        return {}


@attrs.frozen
class StartsByColumn(CumulativeAttention):
    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        return {"mass": torch.arange(windows, dtype=torch.float32, device=device).expand(lanes, windows)}


@attrs.frozen
class MixesLanes(CumulativeAttention):
    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        return {IMPORTANCE: state["mass"] - state["mass"].mean(dim=0)}


@attrs.frozen
class RanksByColumn(CumulativeAttention):
    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        return {IMPORTANCE: state["mass"] + torch.arange(windows.positions.shape[1])}


@attrs.frozen
class LooksAtItsNeighbour(CumulativeAttention):
    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        return {IMPORTANCE: state["mass"] + state["mass"].roll(1, dims=1)}


@attrs.frozen
class CountsFiller(CumulativeAttention):
    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        return {IMPORTANCE: state["mass"] / (windows.positions.amax(dim=1, keepdim=True) + 1)}


@attrs.frozen
class AsksForAnItem(CumulativeAttention):
    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        return {IMPORTANCE: state["mass"] / max(state["mass"].max().item(), 1.0)}


@attrs.frozen
class IndexesByMask(CumulativeAttention):
    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        scores = state["mass"].clone()
        scores[scores < 0] = 0
        return {IMPORTANCE: scores}


@attrs.frozen
class FindsNonzero(CumulativeAttention):
    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        return {IMPORTANCE: state["mass"] + 0 * windows.present.nonzero().shape[0]}


@attrs.frozen
class MakesLists(CumulativeAttention):
    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        return {IMPORTANCE: torch.tensor(state["mass"].tolist())}


@attrs.frozen
class SharesOfAllRows(CumulativeAttention):
    lanes_share_row = True

    def update(self, state: State, observation: Observation) -> State:
        assert observation.mass is not None
        return {"mass": state["mass"] + (observation.mass / observation.mass.sum(dim=(0, 2), keepdim=True)).mean(dim=1)}


@attrs.frozen
class ReadsWhatIsNotWritten(CumulativeAttention):
    needs = frozenset({Need.HELD})

    def update(self, state: State, observation: Observation) -> State:
        held = observation.held
        if held is None:
            return state
        norms = held.keys.float().norm(dim=-1).mean(dim=1)
        anchor = norms.mean(dim=1, keepdim=True)
        return {"mass": observation.sum_by_window(norms - anchor, held.columns)}


@attrs.frozen
class TakesTheWorstQuery(CumulativeAttention):
    """Reads queries that were not asked for."""

    needs = frozenset({Need.MASS_BY_QUERY})

    def update(self, state: State, observation: Observation) -> State:
        by_query = observation.mass_by_query
        return state if by_query is None else {"mass": by_query.amax(dim=(1, 2))}


@attrs.frozen
class SharesOfTheRow(CumulativeAttention):
    """Lawful: a lane's mass as a share of the row's."""

    lanes_share_row = True

    def update(self, state: State, observation: Observation) -> State:
        assert observation.mass is not None
        by_row = observation.mass.mean(dim=1).unflatten(0, (-1, observation.lanes_per_row))
        shares = by_row / by_row.sum(dim=(1, 2), keepdim=True).clamp(min=1e-9)
        return {"mass": state["mass"] + shares.flatten(0, 1)}


BREAKS = (
    Break("test_it_declares_what_it_wants_to_see", Unchecked(), "needs is frozenset({'mass'})"),
    Break("test_it_declares_what_it_wants_to_see", AtEveryNone(), "prompt_stride is 0"),
    Break(
        "test_it_reads_only_what_it_declares",
        AlwaysWantsMasses(observe_tokens=2),
        "(no masses where observe_tokens leaves them out), update raised AssertionError",
    ),
    Break("test_it_reads_only_what_it_declares", ReadsKeys(), "shown Need.MASS, update raised AssertionError"),
    Break("test_it_changes_nothing_that_it_is_given", AddsInPlace(), "update changed the state"),
    Break("test_it_changes_nothing_that_it_is_given", ScalesTheObservation(), "update changed the observation"),
    Break("test_it_changes_nothing_that_it_is_given", SortsPositions(), "rank changed the windows"),
    Break("test_it_says_the_same_again", Remembers(), "asked again, it ranks otherwise"),
    Break("test_states_and_rankings_are_fp32", Double(), "ranking 'importance' is torch.float64"),
    Break("test_states_and_rankings_are_fp32", Half(), "state 'mass' is torch.float16"),
    Break("test_states_and_rankings_are_fp32", InTheKeysDtype(), "dtype=torch.bfloat16"),
    Break("test_states_and_rankings_have_their_axes", OneScoreForAll(), "ranking 'importance' is (1, 1)"),
    Break("test_states_and_rankings_have_their_axes", Silent(), "it returned no ranking"),
    Break("test_every_window_starts_alike", StartsByColumn(), "windows=2"),
    Break("test_a_row_scores_alone_as_among_others", MixesLanes(), "rows=2"),
    Break("test_a_row_scores_alone_as_among_others", SharesOfAllRows(), "row 0, among others, 'importance' differs"),
    Break("test_a_lane_scores_alone_as_among_others", MixesLanes(), "lanes_per_row=2"),
    Break("test_what_means_nothing_changes_nothing", ReadsWhatIsNotWritten(), "with NaN there"),
    Break("test_what_means_nothing_changes_nothing", TakesTheWorstQuery(), "with NaN there"),
    Break("test_the_order_of_columns_means_nothing", RanksByColumn(), "shuffled, 'importance' differs"),
    Break("test_the_order_of_columns_means_nothing", LooksAtItsNeighbour(), "shuffled, 'importance' differs"),
    Break("test_absent_columns_change_nothing", CountsFiller(), "beside filler"),
    Break("test_the_host_never_waits", AsksForAnItem(), "_local_scalar_dense"),
    Break("test_the_host_never_waits", IndexesByMask(), "index_put_"),
    Break("test_the_host_never_waits", FindsNonzero(), "nonzero"),
    Break("test_the_host_never_waits", MakesLists(), "tolist"),
)


@breaks(*BREAKS)
def test_a_broken_scorer_is_told_which_law_it_breaks(broken: Break) -> None:
    report(ScorerContract, broken)


def test_every_law_is_broken_by_some_scorer() -> None:
    assert {each.law for each in BREAKS} == laws_of(ScorerContract)


def test_the_smallest_case_is_shown() -> None:
    text = report(ScorerContract, Break("test_a_lane_scores_alone_as_among_others", MixesLanes()))
    assert "law: Lanes are strangers, unless ``lanes_share_row``: a lane's scores depend on that lane alone." in text
    assert "smallest case: ScorerCase(rows=1, lanes_per_row=2, heads=1, windows=1, pieces=1, later=0, tokens=1" in text


def test_lanes_of_a_row_may_share_if_the_scorer_says_so() -> None:
    passes(ScorerContract, SharesOfTheRow(), "test_a_row_scores_alone_as_among_others")
    with pytest.raises(pytest.skip.Exception, match="declares lanes_share_row = True"):
        passes(ScorerContract, SharesOfTheRow(), "test_a_lane_scores_alone_as_among_others")


SHOWN = {
    Need.MASS_BY_QUERY: {"mass_by_query", "asked"},
    Need.QUERIES: {"queries", "asked"},
    Need.FIRST_LOOKS: {"first"},
    Need.PROMPT: {"held"},
    Need.OUTPUT_PROJECTION: {"output"},
}
BESIDE = {Need.POSITIONS, Need.FIRST_LOOKS, Need.ROTARY, Need.OUTPUT_PROJECTION}
"""What is only of use beside something to score, so that by itself it is no reason to show anything."""


@pytest.mark.parametrize("need", Need)
def test_a_scorer_is_shown_only_what_it_needs(need: Need) -> None:
    seen: list[Observation] = []

    @attrs.frozen
    class Looks(CumulativeAttention):
        needs = frozenset({need, Need.KEYS} if need in BESIDE else {need})

        def update(self, state: State, observation: Observation) -> State:
            seen.append(observation)
            return state

    type("Judged", (ScorerContract,), {"part": Looks()})().test_it_reads_only_what_it_declares()
    always = {"columns", "windows", "stands_for", "ends_prompt", "lanes_per_row"}
    optional = {field.name for field in attrs.fields(Observation)} - always
    shown = {name for each in seen for name in optional if getattr(each, name) is not None}
    assert shown == SHOWN.get(need, {need.value}) | ({"keys"} if need in BESIDE else set())


def test_what_a_scorer_is_shown_fits_together() -> None:
    """Masses of a query are a part of 1; all of the prompt's queries are in its pieces; what is held is what is."""

    @attrs.frozen
    class Sees(CumulativeAttention):
        needs = frozenset(Need)

    case = ScorerCase(2, 2, 2, windows=4, pieces=2, later=2, tokens=3, dtype=torch.float32, seed=7)
    for scorer in (Sees(), Sees(prompt_queries=3), Sees(prompt_stride=2)):
        first, last, one, other, *later = case.observations(scorer)
        assert [each.ends_prompt for each in (first, last, one, other, *later)] == [False, True, *[False] * 4]
        assert first.mass is not None
        assert last.mass is not None
        assert last.mass_by_query is not None
        assert last.asked is not None
        torch.testing.assert_close(first.mass + last.mass, last.mass_by_query.sum(dim=2))
        assert last.mass_by_query.sum(dim=3).amax() <= 1
        assert last.asked.shape[1] == last.mass_by_query.shape[2] <= (scorer.prompt_queries or 99)
        assert last.held is not None
        assert last.positions is not None
        written = last.held.columns >= 0
        starts = last.positions.gather(1, last.held.columns.clamp(min=0))
        inside = (last.held.positions - starts)[written]
        assert inside.min() == 0
        assert inside.max() == 3
        assert [each.held is not None for each in later].count(True) == 1
        assert one.reconstruction is not None
        assert other.reconstruction is not None
        assert ((one.reconstruction > 0) ^ (other.reconstruction > 0)).all()
        assert one.keys is one.mass is None
