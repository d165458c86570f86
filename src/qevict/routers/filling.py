"""What routers are made of: rank the candidates, then fill tier after tier.

A router is a rule by which some of the remaining windows are chosen for so many slots. With ranks made once::

    groups = Groups(windows, self.scope)
    ranks = rank_candidates(named(rankings, IMPORTANCE, self), windows, self.scope)
    place = fill(groups, costs, groups.room(capacities, costs.tier_bytes, self.shares), partial(best, ranks))

Ranks are ``[groups, columns]``, the columns of all members one lane after another, or ``[groups, members, windows]``
for each lane alone; slots and budgets are per group or per member likewise.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import SupportsFloat

import torch
from torch import Tensor

from qevict.contracts.router import Scope, TierRouter
from qevict.contracts.values import Costs, Windows
from qevict.errors import ContractError
from qevict.routers.sharing import Groups, Room, part_of
from qevict.transfer import to_device

Choose = Callable[[Tensor, Tensor], Tensor]
"""Which of the remaining windows ``[groups, members, windows]`` get one of the slots ``[groups]``, as a mask."""


def named(rankings: Mapping[str, Tensor], name: str, router: TierRouter) -> Tensor:
    """A ranking by its name.

    Raises:
        ContractError: the scorer offers no such ranking.
    """
    if name not in rankings:
        msg = f"router {router.name!r} reads the ranking {name!r}, the scorer offers {sorted(rankings)}"
        raise ContractError(msg)
    return rankings[name]


def rank_candidates(scores: Tensor, windows: Windows, scope: Scope = "lane") -> Tensor:
    """Ranks among the candidates of a group, 0 for the best; ties go to the earlier position, then to the lower lane.

    Returns:
        ``[groups, columns]``, which is ``[lanes, windows]`` where each lane is ranked alone.
    """
    groups = Groups(windows, scope)
    scores, positions, candidate = (
        groups.gather(values).flatten(1) for values in (scores, windows.positions, windows.candidate)
    )
    by_position = positions.argsort(dim=1, stable=True)
    lowest = torch.finfo(scores.dtype).min
    finite = scores.nan_to_num(nan=lowest, neginf=lowest)  # whatever a scorer says, no filler outranks a candidate
    ordered = finite.masked_fill(~candidate, -torch.inf).gather(1, by_position)
    order = by_position.gather(1, ordered.argsort(dim=1, descending=True, stable=True))
    ranks = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks)


def best(ranks: Tensor, among: Tensor, slots: Tensor) -> Tensor:
    """The best of some windows: at most as many as there are slots, of each group or member as the ranks are.

    Args:
        ranks: from :func:`rank_candidates`, of groups; or gathered, of members.
        among: ``[groups, members, windows]``; which windows.
        slots: ``[groups]`` or ``[groups, members]``.
    """
    chosen = among.reshape(ranks.shape)
    by_rank = torch.empty_like(chosen).scatter_(-1, ranks, chosen)
    place_in_line = by_rank.cumsum(-1).gather(-1, ranks)
    return (chosen & (place_in_line <= slots[..., None])).reshape(among.shape)


def top_up(chosen: Tensor, ranks: Tensor, among: Tensor, slots: Tensor) -> Tensor:
    """What is chosen already, and the best of the others in the slots that it leaves; arguments as of :func:`best`."""
    left = slots - chosen.reshape(ranks.shape).sum(-1)
    return chosen | best(ranks, among & ~chosen, left)


def best_of_two(first: Tensor, second: Tensor, among: Tensor, slots: Tensor, first_share: SupportsFloat) -> Tensor:
    """``floor(first_share * slots)`` by the first ranks, the rest by the second; arguments as of :func:`best`."""
    return top_up(best(first, among, part_of(slots, first_share)), second, among, slots)


def fill(groups: Groups, costs: Costs, room: Room, choose: Choose) -> Tensor:
    """Places of all windows when tier after tier is filled, hot to cold, and the rest is evicted.

    A window that keeps codes while it lives in a hotter tier is billed to the tier whose codes they are: its group has
    one slot less there.

    Args:
        groups: who shares.
        costs: who keeps codes.
        room: of each group.
        choose: at most as many of the remaining windows as there are slots.
    """
    windows = groups.windows
    slots = to_device(room, windows.place.device).view(-1, len(costs.tier_bytes))
    remaining = groups.gather(windows.candidate)
    place = torch.full_like(remaining, slots.shape[1], dtype=windows.place.dtype)
    for tier in range(slots.shape[1]):
        free = slots[:, tier] - _windows_billed(groups, place, costs, tier)
        chosen = choose(remaining, free.clamp(min=0))
        place = torch.where(chosen, tier, place)
        remaining = remaining & ~chosen
    return torch.where(windows.candidate, groups.spread(place), windows.place)


def _windows_billed(groups: Groups, place: Tensor, costs: Costs, tier: int) -> Tensor | int:
    """Slots of ``tier`` taken by windows of hotter tiers that keep codes there, ``[groups]``."""
    if costs.kept is None or tier == 0:
        return 0
    return ((place < tier) & groups.gather(costs.kept[..., tier])).sum((1, 2))


def counted(windows: Windows, costs: Costs, room: Room) -> tuple[tuple[int, ...], ...] | None:
    """How many windows of each lane every tier takes, where the host knows: no lane shares, and nobody keeps codes."""
    if costs.kept is not None:
        return None
    return tuple(_filled(slots, left) for slots, left in zip(room, windows.candidates, strict=True))


def _filled(slots: tuple[int, ...], windows: int) -> tuple[int, ...]:
    """How many windows each tier takes when they fill one after the other."""
    full = (0, *itertools.accumulate(slots))
    return tuple(min(after, windows) - min(before, windows) for before, after in itertools.pairwise(full))
