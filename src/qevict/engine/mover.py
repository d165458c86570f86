"""The only hand that moves bytes: carries a plan out, exactly as many windows as it names."""

import operator
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from qevict.contracts.values import Codes
from qevict.engine import fitting
from qevict.engine import records as table
from qevict.engine.layer import Layer, part, with_slack
from qevict.engine.stack import Stack
from qevict.engine.tally import Move, Tally


def apply(stack: Stack, move: Move, tally: Tally, room: Sequence[int], spare: Sequence[int | None]) -> None:
    """Move windows: evict, then down (coldest tier first), then up (hottest first), so that slots are free in time.

    Args:
        stack: what is moved.
        move: from :func:`qevict.engine.tally.prepare`.
        tally: its numbers.
        room: windows to be open in each lane afterwards.
        spare: by layer, bytes that its pools may take beyond what is needed, as room to grow; None for no limit.
    """
    segments = range(stack.wiring.segments)
    needs = [tuple(map(max, *pair)) for pair in zip(tally.live, tally.peak, strict=True)]
    needs[0] = tuple(own + goal - old for own, goal, old in zip(needs[0], room, stack.records.opened, strict=True))
    for index, (layer, left) in enumerate(zip(stack.layers, spare, strict=True)):
        _grow(layer, [stack.of_layer(lanes, index) for lanes in needs], left)
    _drop(stack, move, ~move.keep)
    for target in reversed(segments):
        for source in segments[:target]:
            _carry(stack, move, tally, source, target)
        _drop(stack, move, (move.segment == target) & (move.source <= target))
    for target in segments:
        for source in segments[target + 1 :]:
            _carry(stack, move, tally, source, target)
        _drop(stack, move, move.segment == target)
    _note(stack, move, tally)
    stack.open_windows(room)


def shrink(layer: Layer, allowed_bytes: int | None) -> None:
    """Give slack back: all of it where the layer holds more than it may, and what exceeds twice the usual anyway."""
    over = allowed_bytes is not None and layer.nbytes > allowed_bytes
    for segment, live in enumerate(layer.live):
        usual = [with_slack(own) for own in live]
        most = sum(live) if over else sum(map(with_slack, usual))
        if layer.pools[segment].capacity > most:
            layer.repack(segment, live if over else usual)


def _grow(layer: Layer, needs: Sequence[Sequence[int]], spare_bytes: int | None) -> None:
    """Make every lane's regions as large as they must be; the slack that each gets is paid from what is spare.

    Pools that need not grow keep their slack, which has been paid.
    """
    blocks = layer.wiring.slot_bytes
    grows = [any(map(operator.gt, own, old)) for own, old in zip(needs, layer.regions, strict=True)]
    if spare_bytes is not None:
        kept = zip(blocks, layer.regions, needs, grows, strict=True)
        spare_bytes -= sum(block * (sum(old) - sum(own)) for block, old, own, grow in kept if not grow)
    for segment, own in enumerate(needs):
        if not grows[segment]:
            continue
        block, regions = blocks[segment], []
        for need in map(max, own, layer.live[segment]):  # what will leave a lane has not left yet
            slack = with_slack(need) - need
            if spare_bytes is not None:
                slack = max(0, min(slack, spare_bytes // block))
                spare_bytes -= slack * block
            regions.append(need + slack)
        layer.repack(segment, regions)


def _drop(stack: Stack, move: Move, lines: Tensor) -> None:
    """Forget the slots that some lines do not need any more."""
    slots = stack.records.slots
    new_home = move.segment[:, None] == torch.arange(slots.shape[1], device=slots.device)
    needed = move.slots_kept | (new_home & move.keep[:, None])
    slots.masked_fill_(lines[:, None] & ~needed, -1)


def _carry(stack: Stack, move: Move, tally: Tally, source: int, target: int) -> None:
    """Give windows whose place is in ``target`` the representation they lack, from the best they have."""
    counts = tally.carried[source][target]
    if not any(counts):
        return
    slots = stack.records.slots
    wanted = (move.source == source) & (move.segment == target) & move.keep & (slots[:, target] < 0)
    lines = torch.nonzero_static(wanted, size=sum(counts))[:, 0]
    by_layer = [sum(stack.of_layer(counts, index)) for index in range(len(stack.layers))]
    blocks = _read(stack, source, slots[lines, source].long().split(by_layer))
    into = stack.free_slots(target, stack.lane_of[lines])
    positions = _positions(stack, move, lines)
    vectors = _decoded(stack, source, {**blocks, **fitting.by_line(stack, source, lines)}, positions)
    fitting.fit(stack, tally, source, target, vectors)
    encoded = _encoded(stack, target, vectors, positions, fitting.by_line(stack, target, lines))
    _write(stack, target, into.split(by_layer), encoded)
    slots[lines, target] = into.int()


def _read(stack: Stack, segment: int, slots: Sequence[Tensor]) -> Codes:
    """Blocks of all layers, side by side."""
    blocks = [layer.pools[segment].read(own) for layer, own in zip(stack.layers, slots, strict=True) if own.shape[0]]
    return blocks[0] if len(blocks) == 1 else {name: torch.cat([own[name] for own in blocks], 1) for name in blocks[0]}


def _write(stack: Stack, segment: int, slots: Sequence[Tensor], blocks: Codes) -> None:
    """Give every layer its part of the blocks."""
    sizes = [own.shape[0] for own in slots]
    parts = {name: array.split(sizes, dim=1) for name, array in blocks.items()}
    for index, (layer, own) in enumerate(zip(stack.layers, slots, strict=True)):
        if sizes[index]:
            layer.pools[segment].write(own, {name: part[index] for name, part in parts.items()})


def _positions(stack: Stack, move: Move, lines: Tensor) -> Tensor:
    """Rotary positions of the tokens of some windows, ``[windows, window]``."""
    policy = stack.wiring.policy
    first = stack.records.window[lines].long() * policy.window_tokens + policy.sink_tokens
    steps = torch.arange(policy.window_tokens, device=first.device)
    return first[:, None] + steps + move.offset[stack.lane_of[lines]][:, None]


def _decoded(stack: Stack, source: int, block: Codes, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Pre-RoPE keys, and values, in fp32."""
    wiring = stack.wiring
    if source == 0:
        assert wiring.rotary is not None
        return wiring.rotary.unrotate(block["keys"], positions), block["values"].float()
    keys, values = wiring.codecs[source - 1]
    head_dim = wiring.geometry.head_dim
    return keys.decode(part(block, "keys."), head_dim), values.decode(part(block, "values."), head_dim)


def _encoded(
    stack: Stack, target: int, vectors: tuple[Tensor, Tensor], positions: Tensor, common: Codes
) -> dict[str, Tensor]:
    """What the target pool stores of pre-RoPE keys and of values, which share what is in common."""
    wiring, (keys, values) = stack.wiring, vectors
    if target == 0:
        assert wiring.rotary is not None
        return {"keys": wiring.rotary.rotate(keys, positions), "values": values}
    for_keys, for_values = wiring.codecs[target - 1]
    of_keys, of_values = (
        for_keys.encode(keys, part(common, "keys.")),
        for_values.encode(values, part(common, "values.")),
    )
    return {f"keys.{name}": array for name, array in of_keys.items()} | {
        f"values.{name}": array for name, array in of_values.items()
    }


def _note(stack: Stack, move: Move, tally: Tally) -> None:
    """Write the moves into the table and drop the lines of what was evicted."""
    records = stack.records
    changed = move.keep & (move.place.clamp(min=0) != records.place.clamp(min=0))
    noted = attrs.evolve(records, place=move.place.to(torch.int8), moves=records.moves + changed.to(torch.int16))
    stack.put_back(table.kept(noted, move.keep, move.segment, tally.counts))
    stack.set_live(tally.live)
    for index, layer in enumerate(stack.layers):
        promoted, demoted, evicted = (
            sum(stack.of_layer(lanes, index)) for lanes in (tally.promotions, tally.demotions, tally.evictions)
        )
        layer.totals.promotions += promoted
        layer.totals.demotions += demoted
        layer.totals.evictions += evicted
        carried = any(any(stack.of_layer(lanes, index)) for row in tally.carried for lanes in row)
        layer.whole = layer.whole and not evicted and not carried
