"""QEvict's routing: fill the hottest tier with the best windows, then the next, and evict what is left."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Costs, MovePlan, Windows
from qevict.errors import ContractError, PolicyError
from qevict.transfer import to_device

_UNLIMITED = 2**31 - 1


def _as_tuple(value: Iterable[float]) -> tuple[float, ...]:
    return tuple(value)


def _shares(_instance: object, _attribute: object, value: tuple[float, ...]) -> None:
    numbers = all(isinstance(share, int | float) and share >= 0 for share in value)
    if not value or not numbers or not abs(sum(value) - 1) <= 1e-9:
        msg = f"shares say which part of the bytes each tier gets, hot to cold: none negative, sum 1; got {value!r}"
        raise PolicyError(msg)


@attrs.frozen
class GreedyTiers(TierRouter):
    """Each tier gets a share of the bytes; windows fill them by descending score.

    With shares ``(1 - q, q)``: ``K_f = floor((1 - q) B / M_f)`` windows in full precision, ``K_q = floor(q B / M_q)``
    as codes, the rest evicted; QEvict (arXiv 2608.05326), eq. 3-5 and algorithm 1. A window that keeps codes while it
    lives in a hotter tier is billed to the tier whose codes they are, so that fewer windows fit there.

    Args:
        shares: part of the bytes for each tier, hot to cold.
    """

    name: ClassVar[str] = "greedy"
    shares: tuple[float, ...] = attrs.field(default=(1.0,), converter=_as_tuple, validator=_shares)

    def check(self, tiers: int) -> None:
        """One share per tier."""
        if tiers != len(self.shares):
            msg = f"{len(self.shares)} shares {self.shares} for {tiers} tiers; give one share per tier, hot to cold"
            raise PolicyError(msg)

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        """Fill tier after tier."""
        if IMPORTANCE not in rankings:
            msg = f"router {self.name!r} reads the ranking {IMPORTANCE!r}, the scorer offers {sorted(rankings)}"
            raise ContractError(msg)
        rank = rank_candidates(rankings[IMPORTANCE], windows)
        room = [self.fits(capacity, costs.tier_bytes) for capacity in capacities]
        place = torch.full_like(windows.place, len(self.shares))
        filled = torch.zeros(len(room), 1, dtype=rank.dtype, device=rank.device)
        for tier in range(len(self.shares)):
            slots = to_device([[lane[tier]] for lane in room], rank.device)
            slots = (slots - _windows_billed(place, costs, tier)).clamp(min=0)
            inside = (rank >= filled) & (rank < filled + slots)
            place = torch.where(inside, tier, place)
            filled = filled + slots
        place = torch.where(windows.candidate, place, windows.place)
        counts = _count(room, windows.candidates) if costs.kept is None else None
        return MovePlan(place, counts)

    def fits(self, capacity: int | None, tier_bytes: Sequence[int]) -> tuple[int, ...]:
        """How many windows each tier holds: ``floor(share * bytes / window bytes)``."""
        if capacity is None:
            return (_UNLIMITED,) + (0,) * (len(self.shares) - 1)
        return tuple(int(share * capacity / cost + 1e-9) for share, cost in zip(self.shares, tier_bytes, strict=True))


def rank_candidates(scores: Tensor, windows: Windows) -> Tensor:
    """``[lanes, windows]`` ranks among candidates, 0 for the best; ties go to the earlier position."""
    by_position = windows.positions.argsort(dim=1, stable=True)
    lowest = torch.finfo(scores.dtype).min
    finite = scores.nan_to_num(nan=lowest, neginf=lowest)  # whatever a scorer says, no filler outranks a candidate
    ordered = finite.masked_fill(~windows.candidate, -torch.inf).gather(1, by_position)
    order = by_position.gather(1, ordered.argsort(dim=1, descending=True, stable=True))
    ranks = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks)


def _windows_billed(place: Tensor, costs: Costs, tier: int) -> Tensor | int:
    """Slots of ``tier`` taken by windows of hotter tiers that keep codes there, ``[lanes, 1]``."""
    if costs.kept is None:
        return 0
    return ((place < tier) & costs.kept[..., tier]).sum(1, keepdim=True)


def _count(room: Sequence[tuple[int, ...]], candidates: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(_fill(slots, left) for slots, left in zip(room, candidates, strict=True))


def _fill(slots: tuple[int, ...], windows: int) -> tuple[int, ...]:
    """How many windows each tier takes when they fill one after the other."""
    full = (0, *itertools.accumulate(slots))
    return tuple(min(after, windows) - min(before, windows) for before, after in itertools.pairwise(full))
