"""All state of one cache as named tensors and plain numbers, and back; what is in free slots is left out."""

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from qevict.engine import records as table
from qevict.engine.engine import Engine
from qevict.engine.layer import Layer, Totals, part
from qevict.engine.records import Counts
from qevict.engine.selection import hide
from qevict.engine.shared import Shared
from qevict.errors import UnsupportedOperationError

COLUMNS = {"window": torch.int32, "place": torch.int8, "moves": torch.int16}
"""Columns of the table of records that every policy has, beside the slots."""


@attrs.frozen
class LayerNumbers:
    """What the host knows of one layer; see :class:`qevict.engine.layer.Layer` and its records."""

    counts: Counts
    opened: tuple[int, ...]
    regions: Counts
    live: Counts
    whole: bool
    totals: tuple[int, int, int]


@attrs.frozen
class Numbers:
    """What the host knows of a cache; see :class:`qevict.engine.clock.Clock`."""

    seen: int
    tokens: tuple[int, ...]
    since: tuple[int, ...]
    unbroken: tuple[int, ...]
    events: tuple[tuple[int, ...], ...]
    prompt_tokens: int | None
    prompted: bool
    layers: tuple[LayerNumbers, ...]


@attrs.frozen(eq=False)
class Snapshot:
    """A cache's state, tied to nothing.

    Attributes:
        tensors: by name; none shares its storage with another.
        numbers: the rest.
    """

    tensors: Mapping[str, Tensor]
    numbers: Numbers


def take(engine: Engine) -> Snapshot:
    """Copy all state out.

    Raises:
        InterruptedCacheError: a forward over the cache broke off half way.
        UnsupportedOperationError: it lies between pieces of a prompt whose queries its scorer waits for.
    """
    engine.check_whole()
    if any(layer.asked is not None for layer in engine.layers):
        name = engine.wiring.policy.scorer.name
        msg = f"scorer {name!r} waits for the end of a prompt that is read in pieces; save the cache when it has ended"
        raise UnsupportedOperationError(msg)
    clock, tensors = engine.clock, {}
    for name, value in (("clock.offset", clock.offset), ("clock.faults", clock.faults)):
        if value is not None:
            tensors[name] = value.clone()
    for index, layer in enumerate(engine.layers):
        tensors |= {f"layers.{index}.{name}": own for name, own in _tensors_of(layer).items()}
    own = (clock.seen, clock.tokens, clock.since, clock.unbroken, clock.events, clock.prompt_tokens, clock.prompted)
    return Snapshot(tensors, Numbers(*own, layers=tuple(map(_numbers_of, engine.layers))))


def _numbers_of(layer: Layer) -> LayerNumbers:
    totals = (layer.totals.promotions, layer.totals.demotions, layer.totals.evictions)
    return LayerNumbers(layer.records.counts, layer.records.opened, layer.regions, layer.live, layer.whole, totals)


def _tensors_of(layer: Layer) -> dict[str, Tensor]:
    records = layer.records
    columns = {name: getattr(records, name) for name in (*COLUMNS, "slots")}
    columns |= {f"state.{name}": column for name, column in records.state.items()}
    columns |= {"sinks.keys": layer.sink_keys, "sinks.values": layer.sink_values}
    columns |= dict(layer.shared.tensors())
    found = {name: column.clone(memory_format=torch.contiguous_format) for name, column in columns.items()}
    for segment, pool in enumerate(layer.pools):
        blocks = pool.read(_owned(records.slots, segment, sum(layer.live[segment])))
        found |= {f"pools.{segment}.{name}": array.contiguous() for name, array in blocks.items()}
    return found


def _owned(slots: Tensor, segment: int, live: int) -> Tensor:
    """Slots in use, in the order of the table."""
    owners = torch.nonzero_static(slots[:, segment] >= 0, size=live)[:, 0]
    return slots[owners, segment].long()


def restore(engine: Engine, snapshot: Snapshot) -> None:
    """Fill an empty engine, wired as the snapshot's was, so that it goes on bit for bit.

    The tensors lie on its device; those from a file were looked at by :mod:`qevict.engine.soundness`.
    """
    clock, numbers, tensors = engine.clock, snapshot.numbers, snapshot.tensors
    clock.seen, clock.tokens, clock.since, clock.unbroken = (
        numbers.seen, numbers.tokens, numbers.since, numbers.unbroken
    )  # fmt: skip
    clock.events, clock.prompt_tokens, clock.prompted = numbers.events, numbers.prompt_tokens, numbers.prompted
    if not clock.tokens:
        return
    clock.offset, clock.faults = tensors["clock.offset"], tensors["clock.faults"]
    clock.lengths = torch.tensor(clock.tokens, dtype=clock.offset.dtype, device=clock.offset.device)
    for index, own in enumerate(numbers.layers):
        layer = Layer.open(engine.wiring, index, len(clock.tokens), clock.offset.device)
        _fill(layer, own, part(tensors, f"layers.{index}."))
        engine.layers.append(layer)
    hide(engine)


def _fill(layer: Layer, numbers: LayerNumbers, tensors: Mapping[str, Tensor]) -> None:
    layer.sink_keys, layer.sink_values = tensors["sinks.keys"], tensors["sinks.values"]
    layer.regions, layer.live, layer.whole = numbers.regions, numbers.live, numbers.whole
    layer.totals = Totals(*numbers.totals)
    layer.shared = Shared.of(tensors, layer.wiring.segments)
    layer.records = table.lay_out(
        numbers.counts,
        opened=numbers.opened,
        slots=tensors["slots"],
        state=part(tensors, "state."),
        **{name: tensors[name] for name in COLUMNS},
    )
    for segment, pool in enumerate(layer.pools):
        slots = _owned(tensors["slots"], segment, sum(numbers.live[segment]))
        pool.repack(slots[:0], slots[:0], sum(numbers.regions[segment]))
        pool.write(slots, part(tensors, f"pools.{segment}."))
