"""What a plan asks of each line of a table, and how much that is."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from qevict.contracts.values import MovePlan
from qevict.engine.records import Counts, Grid
from qevict.engine.stack import Stack
from qevict.engine.wiring import Wiring


@attrs.frozen(eq=False)
class Move:
    """A plan, still on the device.

    Attributes:
        place: new place of each line; the number of tiers for eviction.
        keep: whether each line stays.
        segment: segment of each line's new place.
        slots_kept: ``[lines, segments]`` whether the slot in each pool outlives the move.
        source: segment of the best representation that each line has now.
        offset: rotary minus true position, by lane.
    """

    place: Tensor
    keep: Tensor
    segment: Tensor
    slots_kept: Tensor
    source: Tensor
    offset: Tensor


@attrs.frozen
class Tally:
    """How much a move moves, on the host, by lane.

    Attributes:
        counts: live lines by segment, after the move.
        live: slots in use by pool, after the move.
        peak: likewise after the moves down, before promoted windows let go of what they leave.
        carried: ``[from][to]`` windows that need a representation which they do not own.
        promotions: windows that move to a hotter tier.
        demotions: windows that move to a colder tier.
        evictions: windows that go for good.
    """

    counts: Counts
    live: Counts
    peak: Counts
    carried: tuple[Counts, ...]
    promotions: tuple[int, ...]
    demotions: tuple[int, ...]
    evictions: tuple[int, ...]


def prepare(stack: Stack, grid: Grid, plan: MovePlan, offset: Tensor) -> Move:
    """Work out what a plan asks of each line."""
    records, wiring = stack.records, stack.wiring
    tiers = len(wiring.policy.tiers)
    place = grid.collect(plan.place, records.lines).long()
    keep = place < tiers
    segment = torch.where(keep, wiring.segment_of(place), 0)
    held = records.slots >= 0
    retained = wiring.policy.ledger.retain(tier_codes(wiring, held), place, tiers)
    slots_kept = torch.zeros_like(held)
    slots_kept[:, 1:] = retained[:, retained.shape[1] - wiring.segments + 1 :] & held[:, 1:] & keep[:, None]
    slots_kept[:, 0] = held[:, 0] & (segment == 0) & keep
    return Move(place, keep, segment, slots_kept, held.int().argmax(1), offset)


def tier_codes(wiring: Wiring, held: Tensor) -> Tensor:
    """Slots held ``[..., segments]`` as codes held ``[..., tiers]``; full precision is no code."""
    codes = held[..., wiring.first_segment :].clone()
    if wiring.first_segment == 0:
        codes[..., 0] = False
    return codes


def measure(stack: Stack, move: Move) -> Tensor:
    """The numbers of a tally, ``[numbers, lanes]``, still on the device."""
    records, segments = stack.records, stack.wiring.segments
    arange = torch.arange(segments, device=move.place.device)
    in_segment = (move.segment[:, None] == arange) & move.keep[:, None]
    lacking = in_segment & ~move.slots_kept
    from_segment = (move.source[:, None] == arange) & move.keep[:, None]
    carried = (from_segment[:, :, None] & lacking[:, None, :]).flatten(1)
    hot_before, hot_after = records.place.long().clamp(min=0), move.place.clamp(min=0)
    hotter, colder = (hot_after < hot_before) & move.keep, (hot_after > hot_before) & move.keep
    after = move.slots_kept | lacking
    rising = ((move.source > move.segment) & move.keep)[:, None]
    peak = torch.where(rising, records.slots >= 0, after)
    moved = torch.stack((hotter, colder, ~move.keep), dim=1)
    flags = torch.cat((in_segment, after, peak, carried, moved), dim=1).long()
    by_lane = flags.new_zeros(records.lanes, flags.shape[1]).index_add_(0, stack.lane_of, flags)
    return by_lane.T


def read(stack: Stack, numbers: Sequence[Sequence[int]]) -> Tally:
    """A tally from the numbers of :func:`measure`."""
    segments = stack.wiring.segments
    rows = tuple(map(tuple, numbers))
    square = rows[3 * segments : -3]
    return Tally(
        counts=rows[:segments],
        live=rows[segments : 2 * segments],
        peak=rows[2 * segments : 3 * segments],
        carried=tuple(square[first : first + segments] for first in range(0, segments**2, segments)),
        promotions=rows[-3],
        demotions=rows[-2],
        evictions=rows[-1],
    )


def foresee(stack: Stack, planned: Sequence[Sequence[int]], candidates: Sequence[int]) -> Tally:
    """The tally of a plan whose counts the router knows, before any window owns codes: no device is asked."""
    wiring, records = stack.wiring, stack.records
    none = (0,) * records.lanes
    by_tier: Counts = tuple(zip(*planned, strict=True))
    dense = tuple(held - count for held, count in zip(records.counts[0], candidates, strict=True))
    if wiring.first_segment == 0:
        dense = tuple(map(sum, zip(dense, by_tier[0], strict=True)))
    coded = by_tier[1 - wiring.first_segment :]
    # The first tier, where it is coded, is where windows age into, not a demotion.
    colder = coded[wiring.first_segment :]
    counts = (dense, *coded)
    return Tally(
        counts=counts,
        live=counts,
        peak=counts,
        carried=((none, *coded), *((none,) * wiring.segments for _ in coded)),
        promotions=none,
        demotions=tuple(map(sum, zip(*colder, strict=True))) if colder else none,
        evictions=tuple(had - sum(stay) for had, stay in zip(candidates, planned, strict=True)),
    )
