"""CriticalKV: half of a budget by attention, the rest by what a window's loss would do to the layer's output."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.budget import Budget
from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Costs, MovePlan, RouteAt, Windows
from qevict.policy import Policy
from qevict.routers.filling import best, counted, fill, named, rank_candidates, top_up
from qevict.routers.sharing import Groups, as_shares, check_tiers, part_of, room_of, valid_part, valid_shares
from qevict_baselines.adakv import AdaptiveHeads, fill_heads
from qevict_baselines.composing import evicting
from qevict_baselines.output_norms import OutputNorms
from qevict_baselines.pooling import Pool
from qevict_baselines.snapkv import ObservationWindow

ATTENTION = "attention"
"""The ranking by which the first stage chooses; the second goes by the ranking that all routers read."""


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


def best_of_two(first: Tensor, second: Tensor, among: Tensor, slots: Tensor, first_share: float) -> Tensor:
    """Part of the slots by the first ranks, the rest by the second; arguments as of ``best``."""
    return top_up(best(first, among, part_of(slots, first_share)), second, among, slots)


def criticalkv(
    budget: Budget | str,
    *,
    first_share: float = 0.5,
    observed_tokens: int = 32,
    kernel: int = 5,
    pool: Pool = "average",
    route_at: RouteAt = "prompt",
    dtype: torch.dtype | None = None,
) -> Policy:
    """SnapKV's scores for half of each head's budget, times the norm of the projected value for the rest.

    CriticalKV (Feng et al., arXiv 2502.03805), algorithm 1: see :class:`TwoStages` and
    :class:`~qevict_baselines.output_norms.OutputNorms`.

    Bytes: full precision for each kept token, and 20 of bookkeeping per token and KV head.

    Args:
        budget: bytes per row.
        first_share: the paper's alpha, 0.5.
        observed_tokens: the observation window, which every head keeps.
        kernel: of the pool under the scores, as in SnapKV.
        pool: likewise.
        route_at: "prompt" (default, the paper's), or "period" to hold the budget while decoding.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    scorer = OutputNorms(ObservationWindow(observed_tokens, kernel, pool))
    router = TwoStages(first_share=first_share)
    return evicting(budget, scorer, router, recent_tokens=observed_tokens, route_at=route_at, dtype=dtype)


def ada_criticalkv(
    budget: Budget | str,
    *,
    alpha: float = 0.2,
    first_share: float = 0.5,
    observed_tokens: int = 32,
    kernel: int = 5,
    pool: Pool = "average",
    route_at: RouteAt = "prompt",
    dtype: torch.dtype | None = None,
) -> Policy:
    """AdaKV's budgets, CriticalKV's choice within them.

    CriticalKV (arXiv 2502.03805) on AdaKV (arXiv 2407.11550): see :class:`AdaptiveTwoStages`.

    Bytes: full precision for each kept token, and 20 of bookkeeping per token and KV head, ragged over the heads.

    Args:
        budget: bytes per row.
        alpha: weight of the uniform share in AdaKV; 0.2.
        first_share: part of each head's budget for the first stage; 0.5.
        observed_tokens: the observation window, which every head keeps.
        kernel: of the pool under the scores, as in SnapKV.
        pool: likewise.
        route_at: "prompt" (default, the paper's), or "period" to hold the budget while decoding.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    scorer = OutputNorms(ObservationWindow(observed_tokens, kernel, pool))
    router = AdaptiveTwoStages(AdaptiveHeads(alpha=alpha), first_share)
    return evicting(budget, scorer, router, recent_tokens=observed_tokens, route_at=route_at, dtype=dtype)
