"""The only hand that moves bytes: carries a plan out, exactly as many windows as it names."""

import operator
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from qevict.contracts.values import MovePlan
from qevict.engine import records as table
from qevict.engine.layer import Layer, part, with_slack
from qevict.engine.records import Counts, Grid


@attrs.frozen(eq=False)
class Move:
    """A plan for one layer, still on the device.

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
    """How much a move moves, on the host.

    Attributes:
        counts: live lines by segment and lane, after the move.
        live: slots in use by pool and lane, after the move.
        peak: likewise after the moves down, before promoted windows let go of what they leave.
        carried: ``[from][to]`` windows that need a representation which they do not own.
        promotions: windows that move to a hotter tier.
        demotions: windows that move to a colder tier.
        evictions: windows that go for good.
    """

    counts: Counts
    live: Counts
    peak: Counts
    carried: tuple[tuple[int, ...], ...]
    promotions: int
    demotions: int
    evictions: int


def prepare(layer: Layer, grid: Grid, plan: MovePlan, offset: Tensor) -> Move:
    """Work out what a plan asks of each line."""
    records, wiring = layer.records, layer.wiring
    tiers = len(wiring.policy.tiers)
    place = grid.collect(plan.place, records.lines).long()
    keep = place < tiers
    segment = torch.where(keep, wiring.segment_of(place), 0)
    held = records.slots >= 0
    retained = wiring.policy.ledger.retain(tier_codes(layer, held), place, tiers)
    slots_kept = torch.zeros_like(held)
    slots_kept[:, 1:] = retained[:, retained.shape[1] - wiring.segments + 1 :] & held[:, 1:] & keep[:, None]
    slots_kept[:, 0] = held[:, 0] & (segment == 0) & keep
    return Move(place, keep, segment, slots_kept, held.int().argmax(1), offset)


def tier_codes(layer: Layer, held: Tensor) -> Tensor:
    """Slots held ``[..., segments]`` as codes held ``[..., tiers]``; full precision is no code."""
    codes = held[..., layer.wiring.first_segment :].clone()
    if layer.wiring.first_segment == 0:
        codes[..., 0] = False
    return codes


def measure(layer: Layer, move: Move) -> Tensor:
    """The numbers of a tally as one device tensor, to be read together with other layers'."""
    records, segments = layer.records, layer.wiring.segments
    arange = torch.arange(segments, device=move.place.device)
    in_segment = (move.segment[:, None] == arange) & move.keep[:, None]
    lacking = in_segment & ~move.slots_kept
    from_segment = (move.source[:, None] == arange) & move.keep[:, None]
    carried = (from_segment[:, :, None] & lacking[:, None, :]).sum(0)
    hot_before, hot_after = records.place.long().clamp(min=0), move.place.clamp(min=0)
    moved = torch.stack(
        (((hot_after < hot_before) & move.keep).sum(), ((hot_after > hot_before) & move.keep).sum(), (~move.keep).sum())
    )
    after = move.slots_kept | lacking
    rising = ((move.source > move.segment) & move.keep)[:, None]
    flags = torch.cat((in_segment, after, torch.where(rising, records.slots >= 0, after)), dim=1)
    by_lane = torch.zeros(layer.lanes, flags.shape[1], dtype=torch.int64, device=flags.device)
    by_lane.index_add_(0, records.lane_of(), flags.long())
    return torch.cat((by_lane.T.flatten(), carried.flatten(), moved))


def read(layer: Layer, numbers: Sequence[int]) -> Tally:
    """A tally from the numbers of :func:`measure`."""
    lanes, segments = layer.lanes, layer.wiring.segments
    rows = tuple(tuple(numbers[at : at + lanes]) for at in range(0, 3 * segments * lanes, lanes))
    rest = numbers[3 * segments * lanes :]
    square, moved = rest[: segments**2], rest[segments**2 :]
    return Tally(
        counts=rows[:segments],
        live=rows[segments : 2 * segments],
        peak=rows[2 * segments :],
        carried=tuple(tuple(square[s * segments : (s + 1) * segments]) for s in range(segments)),
        promotions=moved[0],
        demotions=moved[1],
        evictions=moved[2],
    )


def foresee(layer: Layer, planned: tuple[tuple[int, ...], ...], candidates: Sequence[int]) -> Tally:
    """The tally of a plan whose counts the router knows, before any window owns codes: no device is asked."""
    wiring, records = layer.wiring, layer.records
    by_tier = list(zip(*planned, strict=True))
    unranked = tuple(dense - count for dense, count in zip(records.counts[0], candidates, strict=True))
    dense = unranked
    if wiring.first_segment == 0:
        dense = tuple(rest + hot for rest, hot in zip(unranked, by_tier[0], strict=True))
    coded = by_tier[1 - wiring.first_segment :]
    moved = [sum(tier) for tier in coded]
    stay = sum(map(sum, by_tier))
    # The first tier, where it is coded, is where windows age into, not a demotion.
    demotions = sum(moved[wiring.first_segment :])
    counts = (dense, *coded)
    return Tally(
        counts=counts,
        live=counts,
        peak=counts,
        carried=((0, *moved), *((0,) * wiring.segments for _ in coded)),
        promotions=0,
        demotions=demotions,
        evictions=sum(candidates) - stay,
    )


def apply(layer: Layer, move: Move, tally: Tally, room: Sequence[int], spare_bytes: int | None) -> None:
    """Move windows: evict, then down (coldest tier first), then up (hottest first), so that slots are free in time.

    Args:
        layer: what is moved.
        move: from :func:`prepare`.
        tally: its numbers.
        room: windows to be open in each lane afterwards.
        spare_bytes: bytes that pools may take beyond what is needed, as room to grow; None for no limit.
    """
    segments = range(layer.wiring.segments)
    needs = [list(map(max, *pair)) for pair in zip(tally.live, tally.peak, strict=True)]
    needs[0] = [own + goal - old for own, goal, old in zip(needs[0], room, layer.records.opened, strict=True)]
    for segment in segments:
        spare_bytes = _grow(layer, segment, needs[segment], spare_bytes)
    _drop(layer, move, ~move.keep)
    for target in reversed(segments):
        for source in segments[:target]:
            _carry(layer, move, tally, source, target)
        _drop(layer, move, (move.segment == target) & (move.source <= target))
    for target in segments:
        for source in segments[target + 1 :]:
            _carry(layer, move, tally, source, target)
        _drop(layer, move, move.segment == target)
    _note(layer, move, tally)
    layer.open_windows(room)


def _drop(layer: Layer, move: Move, lines: Tensor) -> None:
    """Forget the slots that some lines do not need any more."""
    slots = layer.records.slots
    new_home = move.segment[:, None] == torch.arange(slots.shape[1], device=slots.device)
    needed = move.slots_kept | (new_home & move.keep[:, None])
    slots.masked_fill_(lines[:, None] & ~needed, -1)


def shrink(layer: Layer, allowed_bytes: int | None) -> None:
    """Give slack back: all of it where the layer holds more than it may, and what exceeds twice the usual anyway."""
    over = allowed_bytes is not None and layer.nbytes > allowed_bytes
    for segment, live in enumerate(layer.live):
        usual = [with_slack(own) for own in live]
        most = sum(live) if over else sum(map(with_slack, usual))
        if layer.pools[segment].capacity > most:
            layer.repack(segment, live if over else usual)


def _grow(layer: Layer, segment: int, needs: Sequence[int], spare_bytes: int | None) -> int | None:
    """Make every lane's region as large as it must be; the slack that each gets is paid from what is spare."""
    if not any(map(operator.gt, needs, layer.regions[segment])):
        return spare_bytes
    block, regions = layer.wiring.slot_bytes[segment], []
    for need in map(max, needs, layer.live[segment]):  # what will leave a lane has not left yet
        slack = with_slack(need) - need
        if spare_bytes is not None:
            slack = max(0, min(slack, spare_bytes // block))
            spare_bytes -= slack * block
        regions.append(need + slack)
    layer.repack(segment, regions)
    return spare_bytes


def _carry(layer: Layer, move: Move, tally: Tally, source: int, target: int) -> None:
    """Give windows whose place is in ``target`` the representation they lack, from the best they have."""
    count = tally.carried[source][target]
    if count == 0:
        return
    records = layer.records
    wanted = (move.source == source) & (move.segment == target) & move.keep & (records.slots[:, target] < 0)
    lines = torch.nonzero_static(wanted, size=count)[:, 0]
    keys, values = _decoded(layer, move, source, lines)
    slots = layer.free_slots(target, records.lane_of()[lines])
    layer.pools[target].write(slots, _encoded(layer, move, target, lines, (keys, values)))
    records.slots[lines, target] = slots.int()


def _positions(layer: Layer, move: Move, lines: Tensor) -> Tensor:
    """Rotary positions of the tokens of some windows, ``[windows, window]``."""
    policy, records = layer.wiring.policy, layer.records
    first = records.window[lines].long() * policy.window_tokens + policy.sink_tokens
    steps = torch.arange(policy.window_tokens, device=first.device)
    return first[:, None] + steps + move.offset[records.lane_of()[lines]][:, None]


def _decoded(layer: Layer, move: Move, source: int, lines: Tensor) -> tuple[Tensor, Tensor]:
    """Pre-RoPE keys, and values, in fp32."""
    wiring = layer.wiring
    block = layer.pools[source].read(layer.records.slots[lines, source].long())
    if source == 0:
        assert wiring.rotary is not None
        return wiring.rotary.unrotate(block["keys"], _positions(layer, move, lines)), block["values"].float()
    keys, values = wiring.codecs[source - 1]
    head_dim = wiring.geometry.head_dim
    return keys.decode(part(block, "keys."), head_dim), values.decode(part(block, "values."), head_dim)


def _encoded(layer: Layer, move: Move, target: int, lines: Tensor, blocks: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """What the target pool stores of pre-RoPE keys and of values."""
    wiring, (keys, values) = layer.wiring, blocks
    if target == 0:
        assert wiring.rotary is not None
        return {"keys": wiring.rotary.rotate(keys, _positions(layer, move, lines)), "values": values}
    for_keys, for_values = wiring.codecs[target - 1]
    return {f"keys.{name}": array for name, array in for_keys.encode(keys).items()} | {
        f"values.{name}": array for name, array in for_values.encode(values).items()
    }


def _note(layer: Layer, move: Move, tally: Tally) -> None:
    """Write the moves into the table and drop the lines of what was evicted."""
    records, totals = layer.records, layer.totals
    changed = move.keep & (move.place.clamp(min=0) != records.place.clamp(min=0))
    noted = attrs.evolve(records, place=move.place.to(torch.int8), moves=records.moves + changed.to(torch.int16))
    layer.records = table.kept(noted, move.keep, move.segment, tally.counts)
    layer.live = tally.live
    totals.promotions += tally.promotions
    totals.demotions += tally.demotions
    totals.evictions += tally.evictions
    if tally.evictions or any(map(sum, tally.carried)):
        layer.whole = False
