"""AdaKV: heads share their layer's budget, and each gets as much as it has of the layer's highest scores."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Final, Literal, SupportsFloat, get_args

import attrs
import torch
from torch import Tensor

from qevict.contracts.budget import Budget
from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Costs, MovePlan, RouteAt, Windows
from qevict.errors import PolicyError
from qevict.policy import Policy
from qevict.routers.filling import best, fill, named, rank_candidates, top_up
from qevict.routers.sharing import Groups, Room, as_shares, check_tiers, exact, part_of, valid_part, valid_shares
from qevict_baselines.composing import evicting
from qevict_baselines.pooling import Pool
from qevict_baselines.snapkv import ObservationWindow

Floor = Literal["blend", "hard"]
"""What a head is sure of: its share is blended with the uniform one, or its best windows come before all others."""

Budgets = Callable[[Tensor, Tensor], Tensor]
"""How many windows each head gets, ``[groups, members]``: of those that remain, for so many slots of the group."""

Select = Callable[[Tensor, Tensor], Tensor]
"""Which of the remaining windows each head takes for its budget, as a mask."""


def _valid_floor(_instance: object, _attribute: object, value: object) -> None:
    if value not in get_args(Floor):
        msg = f"floor says what each head is sure of: one of {', '.join(map(repr, get_args(Floor)))}; got {value!r}"
        raise PolicyError(msg)


@attrs.frozen
class AdaptiveHeads(TierRouter):
    """Budgets of a layer's heads by where its highest scores are.

    AdaKV (Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, arXiv 2407.11550, algorithm
    1). With ``base`` slots per head, ``B*_g`` of the layer's best ``heads * base`` windows are head g's.

    * ``floor="blend"``, as in the authors' code: ``B_g = round(B*_g (1 - alpha) + int(base alpha))``, halves to even;
      each head keeps its best ``B_g``.
    * ``floor="hard"``, as in kvpress: each head's best ``int(base alpha)`` windows come first, then the layer's best.

    Faithful: the allocation, for any scorer with one ranking, and for each tier by itself. Differs: budgets are in
    bytes and end below the layer's where rounding would exceed it (the excess is taken from the largest budgets, of
    equal ones from the later head); a budget beyond what a head has left goes to the layer's best others; and where
    all remaining windows fit, they stay, as in the authors' code, which then does not compress. Rounding may still
    leave a slot empty, as theirs does. kvpress counts the observation window in its floor, this router does not.

    Stores what its heads keep: ``4 * head_dim`` bytes per token and KV head at 16 bits, ragged over the heads.

    Args:
        shares: part of the bytes for each tier, hot to cold.
        alpha: weight of the uniform share, 1 for equal budgets; 0.2 in the authors' command line and in kvpress.
        floor: what a head is sure of.
    """

    name: ClassVar[str] = "adaptive_heads"
    scope = "layer"
    shares: tuple[float, ...] = attrs.field(default=(1.0,), converter=as_shares, validator=valid_shares)
    alpha: float = attrs.field(default=0.2, validator=valid_part)
    floor: Floor = attrs.field(default="blend", validator=_valid_floor)

    def check(self, tiers: int) -> None:
        """One share per tier."""
        check_tiers(self.shares, tiers)

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        """Each head's best, as many as its budget says."""
        scores, groups = named(rankings, IMPORTANCE, self), Groups(windows, self.scope)
        alone = groups.gather(rank_candidates(scores, windows))
        budgets, room = self.budgets(scores, windows), groups.room(capacities, costs.tier_bytes, self.shares)
        return MovePlan(fill_heads(groups, costs, room, budgets, lambda left, budget: best(alone, left, budget)))

    def budgets(self, scores: Tensor, windows: Windows) -> Budgets:
        """The allocation alone, for routers with another rule of which windows a head takes."""
        alone = Groups(windows, self.scope).gather(rank_candidates(scores, windows))
        together, allocate = rank_candidates(scores, windows, self.scope), _FLOORS[self.floor]
        return lambda remaining, slots: allocate(alone, together, remaining, slots, float(self.alpha))


def fill_heads(groups: Groups, costs: Costs, room: Room, budgets: Budgets, select: Select) -> Tensor:
    """Fill tier after tier: how many windows each head gets, and which, are decided apart."""
    return fill(groups, costs, room, lambda left, slots: select(left, budgets(left, slots)))


def _blended(alone: Tensor, together: Tensor, remaining: Tensor, slots: Tensor, alpha: SupportsFloat) -> Tensor:
    """The uniform share and that of the highest scores, weighted."""
    heads, has = remaining.shape[1], remaining.sum(-1)
    adaptive = best(together, remaining, slots).sum(-1)
    budgets = _not_above(_round(adaptive, alpha, part_of(slots // heads, alpha)[:, None]), slots)
    beyond = (budgets - has).clamp(min=0).sum(-1)
    everything = has.sum(-1) <= slots
    own = best(alone, remaining, budgets)
    return (own | best(together, remaining & ~own, torch.where(everything, slots, beyond))).sum(-1)


def _floored(alone: Tensor, together: Tensor, remaining: Tensor, slots: Tensor, alpha: SupportsFloat) -> Tensor:
    """Each head's best first, then the layer's."""
    safe = part_of(slots // remaining.shape[1], alpha)[:, None]
    return top_up(best(alone, remaining, safe), together, remaining, slots).sum(-1)


_FLOORS: Final[Mapping[Floor, Callable[[Tensor, Tensor, Tensor, Tensor, SupportsFloat], Tensor]]] = MappingProxyType(
    {"blend": _blended, "hard": _floored}
)


def _round(counts: Tensor, alpha: SupportsFloat, more: Tensor) -> Tensor:
    """``round(counts * (1 - alpha) + more)`` in whole numbers, halves to even."""
    part = 1 - exact(alpha)
    over, under = counts * part.numerator, part.denominator
    whole, rest = over // under + more, 2 * (over % under)
    return whole + ((rest > under) | ((rest == under) & (whole % 2 == 1)))


def _not_above(budgets: Tensor, slots: Tensor) -> Tensor:
    """Take what rounding added beyond the slots from the largest budgets, one each; of equal ones the later first."""
    excess = budgets.sum(-1, keepdim=True) - slots[:, None]
    later = torch.ones(budgets.shape[1], budgets.shape[1], dtype=torch.bool, device=budgets.device).triu(1)
    own, other = budgets[:, :, None], budgets[:, None, :]
    before = ((other > own) | ((other == own) & later)).sum(-1)
    return budgets - (before < excess).long()


def adakv(
    budget: Budget | str,
    *,
    alpha: float = 0.2,
    floor: Floor = "blend",
    observed_tokens: int = 32,
    kernel: int = 7,
    pool: Pool = "max",
    route_at: RouteAt = "prompt",
    dtype: torch.dtype | None = None,
) -> Policy:
    """SnapKV's scores; heads share their layer's budget by where its highest scores are (Ada-SnapKV).

    AdaKV (Feng et al., arXiv 2407.11550): see :class:`AdaptiveHeads` and
    :class:`~qevict_baselines.snapkv.ObservationWindow`.

    Bytes: full precision for each kept token, and 16 of bookkeeping per token and KV head, ragged over the heads.

    Args:
        budget: bytes per row.
        alpha: weight of the uniform share; 0.2 as in the authors' command line.
        floor: "blend" (default, the authors'), or "hard", as kvpress has it.
        observed_tokens: the observation window, which every head keeps; 32 as in the authors' code.
        kernel: 7 as in the authors' code.
        pool: "max" as in the authors' code.
        route_at: "prompt" (default, the paper's), or "period" to hold the budget while decoding.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    scorer, router = ObservationWindow(observed_tokens, kernel, pool), AdaptiveHeads(alpha=alpha, floor=floor)
    return evicting(budget, scorer, router, recent_tokens=observed_tokens, route_at=route_at, dtype=dtype)
