"""CriticalKV: half of a budget by attention, the rest by what a window's loss would do to the layer's output."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, SupportsFloat

import attrs
from torch import Tensor

from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Costs, MovePlan, Windows
from qevict.routers.filling import best, counted, fill, named, rank_candidates, top_up
from qevict.routers.sharing import Groups, as_shares, check_tiers, part_of, room_of, valid_part, valid_shares
from qevict_baselines.adakv import AdaptiveHeads, fill_heads
from qevict_baselines.output_norms import ATTENTION


@attrs.frozen
class TwoStages(TierRouter):
    """The best by attention first, then the best by importance, in each lane.

    CriticalKV (Feng et al., arXiv 2502.03805, algorithm 1): with a budget of b windows, ``int(first_share * b)`` are
    the best of the ranking ``"attention"``, and the rest the best others of ``"importance"``, which its scorer makes
    attention times the norm of the projected value. For each tier by itself.

    Faithful: the two stages, on the windows before the observation window, which the policy protects. kvpress counts
    that window in both stages, so that it uses up the first.

    Stores what it keeps: ``4 * head_dim`` bytes per token and KV head at 16 bits.

    Args:
        shares: part of the bytes for each tier, hot to cold.
        first_share: the paper's alpha, 0.5: part of the slots for the first stage.
    """

    name: ClassVar[str] = "two_stages"
    rankings = (ATTENTION, IMPORTANCE)
    shares: tuple[float, ...] = attrs.field(default=(1.0,), converter=as_shares, validator=valid_shares)
    first_share: float = attrs.field(default=0.5, validator=valid_part)

    def check(self, tiers: int) -> None:
        """One share per tier."""
        check_tiers(self.shares, tiers)

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        """Both stages, tier after tier."""
        first, second = (rank_candidates(named(rankings, name, self), windows) for name in self.rankings)
        room = room_of(capacities, costs.tier_bytes, self.shares)
        place = fill(
            Groups(windows, self.scope),
            costs,
            room,
            lambda left, slots: best_of_two(first, second, left, slots, self.first_share),
        )
        return MovePlan(place, counted(windows, costs, room))


@attrs.frozen
class AdaptiveTwoStages(TierRouter):
    """AdaKV says how many windows a head keeps, CriticalKV which.

    Ada-CriticalKV (arXiv 2502.03805, with arXiv 2407.11550): the heads' budgets ``b_g`` come from the ranking
    ``"attention"``; of each, ``int(first_share * b_g)`` windows are its best, and the rest the best others of
    ``"importance"``. As in the authors' plug-in; on what differs see :class:`TwoStages` and
    :class:`~qevict_baselines.adakv.AdaptiveHeads`. Stores what its heads keep, ragged over the heads.

    Args:
        heads: the allocation, with the shares of the tiers.
        first_share: part of each budget for the first stage.
    """

    name: ClassVar[str] = "adaptive_two_stages"
    scope = "layer"
    rankings = (ATTENTION, IMPORTANCE)
    heads: AdaptiveHeads = attrs.field(factory=AdaptiveHeads)
    first_share: float = attrs.field(default=0.5, validator=valid_part)

    def check(self, tiers: int) -> None:
        """One share per tier."""
        self.heads.check(tiers)

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        """Each head's budget in two stages, tier after tier."""
        scores = [named(rankings, name, self) for name in self.rankings]
        groups, budgets = Groups(windows, self.scope), self.heads.budgets(scores[0], windows)
        first, second = (groups.gather(rank_candidates(each, windows)) for each in scores)
        room = room_of(capacities, costs.tier_bytes, self.heads.shares)
        place = fill_heads(
            groups,
            costs,
            room,
            budgets,
            lambda left, budget: best_of_two(first, second, left, budget, self.first_share),
        )
        return MovePlan(place)


def best_of_two(first: Tensor, second: Tensor, among: Tensor, slots: Tensor, first_share: SupportsFloat) -> Tensor:
    """Part of the slots by the first ranks, the rest by the second; arguments as of ``best``."""
    return top_up(best(first, among, part_of(slots, first_share)), second, among, slots)
