"""Each law of routers is broken by some router, and the kit says so."""

from collections.abc import Mapping, Sequence

import attrs
import pytest
import torch
from tests.breaking import Break, breaks, laws_of, passes, report
from torch import Tensor

from qevict.contracts.router import LayerBounds, Scope
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Costs, Geometry, MovePlan, Windows
from qevict.errors import PolicyError
from qevict.routers.greedy import GreedyTiers
from qevict.testing import RouterContract

Rankings = Mapping[str, Tensor]
Capacities = Sequence[int | None]


@attrs.frozen
class Changed(GreedyTiers):
    """A greedy router whose plan, or question, is tampered with."""

    shares: tuple[float, ...] = (0.4, 0.6)

    def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
        return self.tampered(super().plan(rankings, windows, costs, capacities), windows)

    def tampered(self, plan: MovePlan, windows: Windows) -> MovePlan:
        return plan


@attrs.frozen
class Promotes(Changed):
    def tampered(self, plan: MovePlan, windows: Windows) -> MovePlan:
        return MovePlan(torch.where(windows.candidate & (plan.place == 2), 1, plan.place))


@attrs.frozen
class ForgetsCopies(GreedyTiers):
    """Right at the first event; later the codes that windows keep are not billed."""

    def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
        plan = super().plan(rankings, windows, Costs(costs.tier_bytes), capacities)
        return MovePlan(plan.place, plan.counts)


@attrs.frozen
class OneCapacityForAll(GreedyTiers):
    """Looks at lane 0 only."""

    def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
        return super().plan(rankings, windows, costs, [capacities[0]] * len(capacities))


@attrs.frozen
class SharesInSecret(GreedyTiers):
    """Fills the lanes of a row together; each may take more than its own."""

    def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
        return GreedyTiers(self.shares, "layer").plan(rankings, windows, costs, capacities)


@attrs.frozen
class MixesRows(GreedyTiers):
    """Says that lanes of a layer share, and means all rows."""

    scope: Scope = "layer"

    def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
        everyone = attrs.evolve(windows, layers=1, lanes_per_row=len(capacities))
        return super().plan(rankings, everyone, costs, capacities)


@attrs.frozen
class ReadsOutput(GreedyTiers):
    def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
        return super().plan({IMPORTANCE: rankings["output"]}, windows, costs, capacities)


@attrs.frozen
class ReadsTheLast(GreedyTiers):
    def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
        return super().plan({IMPORTANCE: [*rankings.values()][-1]}, windows, costs, capacities)


@attrs.frozen
class Drops(Changed):
    def tampered(self, plan: MovePlan, windows: Windows) -> MovePlan:
        return MovePlan(torch.where(windows.candidate & (plan.place == 2), -1, plan.place))


@attrs.frozen
class PlacesTooFew(Changed):
    def tampered(self, plan: MovePlan, windows: Windows) -> MovePlan:
        return MovePlan(plan.place[:, 1:], plan.counts)


@attrs.frozen
class MovesProtected(Changed):
    def tampered(self, plan: MovePlan, windows: Windows) -> MovePlan:
        return MovePlan(torch.where(windows.candidate, plan.place, 0), plan.counts)


@attrs.frozen
class Miscounts(Changed):
    def tampered(self, plan: MovePlan, windows: Windows) -> MovePlan:
        counts = None if plan.counts is None else tuple(tuple(n + 1 for n in lane) for lane in plan.counts)
        return MovePlan(plan.place, counts)


@attrs.frozen
class LaterWins(GreedyTiers):
    def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
        later = attrs.evolve(windows, positions=-windows.positions)
        return super().plan(rankings, later, costs, capacities)


@attrs.frozen
class FirstColumnWins(GreedyTiers):
    def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
        columns = torch.arange(windows.positions.shape[1]).expand_as(windows.positions)
        return super().plan(rankings, attrs.evolve(windows, positions=columns), costs, capacities)


@attrs.frozen
class ChangesScores(GreedyTiers):
    def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
        rankings[IMPORTANCE].masked_fill_(~windows.candidate, -torch.inf)
        return super().plan(rankings, windows, costs, capacities)


@attrs.frozen
class ChangesWindows(GreedyTiers):
    def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
        plan = super().plan(rankings, windows, costs, capacities)
        return MovePlan(windows.place.copy_(plan.place), plan.counts)


@attrs.frozen(eq=False)
class Wavers(GreedyTiers):
    calls: list[int] = attrs.field(factory=list, repr=False)

    def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
        self.calls.append(1)
        sign = (-1) ** len(self.calls)
        turned = {name: sign * scores for name, scores in rankings.items()}
        return super().plan(turned, windows, costs, capacities)


@attrs.frozen
class Synchronises(GreedyTiers):
    def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
        if not windows.candidate.any():
            return MovePlan(windows.place)
        return super().plan(rankings, windows, costs, capacities)


@attrs.frozen
class SharesTwice(GreedyTiers):
    def share(self, total_bytes: int, geometry: Geometry, bounds: LayerBounds) -> tuple[int, ...]:
        return (total_bytes // geometry.layers + 1,) * geometry.layers


@attrs.frozen
class RefusesRudely(GreedyTiers):
    def check(self, tiers: int) -> None:
        assert tiers == len(self.shares)


BREAKS = (
    Break("test_it_accepts_or_refuses_a_number_of_tiers", RefusesRudely(), "it raised AssertionError"),
    Break("test_layers_share_no_more_than_there_is", SharesTwice(), "layers get"),
    Break("test_it_changes_nothing_that_it_is_given", ChangesScores(), "it changed the rankings"),
    Break("test_it_changes_nothing_that_it_is_given", ChangesWindows(), "it changed the windows"),
    Break("test_equal_input_gives_an_equal_plan", Wavers(), "asked again at event 0"),
    Break("test_every_candidate_is_placed", Drops(), "places of lane 0 by column: {0: -1}"),
    Break("test_every_candidate_is_placed", PlacesTooFew(), "places"),
    Break("test_what_is_not_ranked_stays", MovesProtected(), "that were moved: {0: 0}"),
    Break("test_counts_are_true", Miscounts(), "it counts"),
    Break("test_nobody_takes_more_than_its_capacity", Promotes(), "at event 0, the lanes ["),
    Break("test_nobody_takes_more_than_its_capacity", ForgetsCopies(shares=(0.5, 0.5)), " bytes: ["),
    Break("test_nobody_takes_more_than_its_capacity", OneCapacityForAll(), "the lanes [1] take"),
    Break("test_nobody_takes_more_than_its_capacity", SharesInSecret(), "of "),
    Break("test_nobody_takes_more_than_its_capacity", MixesRows(), "the lanes ["),
    Break("test_who_does_not_share_is_a_stranger", OneCapacityForAll(), "for the lanes [1]"),
    Break("test_who_does_not_share_is_a_stranger", MixesRows(), "among others"),
    Break("test_it_reads_the_rankings_that_it_declares", ReadsOutput(), "it raised KeyError: 'output'"),
    Break("test_it_reads_the_rankings_that_it_declares", ReadsTheLast(), "with one ranking more"),
    Break("test_the_earlier_position_wins_a_tie", LaterWins(), "with the same score"),
    Break("test_the_order_of_columns_means_nothing", FirstColumnWins(), "with columns reversed"),
    Break("test_the_host_never_waits", Synchronises(), "_local_scalar_dense"),
)


@breaks(*BREAKS)
def test_a_broken_router_is_told_which_law_it_breaks(broken: Break) -> None:
    report(RouterContract, broken)


@pytest.mark.parametrize("shares", [(0.3, 0.7), (1.0, 0.0), (0.2, 0.3, 0.5)], ids=str)
def test_lanes_differ_in_capacity_whatever_the_tiers(shares: tuple[float, ...]) -> None:
    report(
        RouterContract,
        Break("test_nobody_takes_more_than_its_capacity", OneCapacityForAll(shares), "the lanes [1] take"),
    )


def test_every_law_is_broken_by_some_router() -> None:
    assert {each.law for each in BREAKS} == laws_of(RouterContract)


def test_only_numbers_of_tiers_that_check_accepts_are_asked() -> None:
    asked = set()

    @attrs.frozen
    class Counts(GreedyTiers):
        def plan(self, rankings: Rankings, windows: Windows, costs: Costs, capacities: Capacities) -> MovePlan:
            asked.add(len(costs.tier_bytes))
            return super().plan(rankings, windows, costs, capacities)

    passes(RouterContract, Counts(shares=(0.2, 0.3, 0.5)), "test_every_candidate_is_placed")
    assert asked == {3}


def test_a_router_that_accepts_no_number_of_tiers_is_told() -> None:
    @attrs.frozen
    class Never(GreedyTiers):
        def check(self, tiers: int) -> None:
            raise PolicyError("never")

    with pytest.raises(ValueError, match="accepts none of 1 to 6 tiers: 1: never"):
        passes(RouterContract, Never(), "test_every_candidate_is_placed")


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_what_shares_is_judged_together(scope: Scope) -> None:
    class Few(RouterContract):
        examples = 10

    for each in ("test_nobody_takes_more_than_its_capacity", "test_who_does_not_share_is_a_stranger"):
        passes(Few, GreedyTiers((0.4, 0.6), scope), each)


def test_a_router_may_read_other_rankings() -> None:
    @attrs.frozen
    class Declares(ReadsOutput):
        rankings = (IMPORTANCE, "output")

    passes(RouterContract, Declares(), "test_it_reads_the_rankings_that_it_declares")


def test_a_router_that_prefers_late_positions_says_so() -> None:
    @attrs.frozen
    class Declares(LaterWins):
        earlier_wins = False

    with pytest.raises(pytest.skip.Exception, match="declares earlier_wins = False"):
        passes(RouterContract, Declares(), "test_the_earlier_position_wins_a_tie")
