"""Rows that are put in another order, repeated or left out: every region of every layer follows."""

from collections.abc import Sequence

from qevict.engine import records as table
from qevict.engine.engine import Engine
from qevict.engine.landing import per_lane
from qevict.engine.layer import Layer
from qevict.engine.stack import Stack
from qevict.engine.waiting import Asked
from qevict.transfer import to_device


def select(engine: Engine, rows: Sequence[int]) -> None:
    """Keep some rows of a cache, in that order, for each time that a row is named; bytes follow.

    What has moved so far stays counted, also in rows that go. Rows that are all kept as they are cost nothing.

    Args:
        engine: the cache's.
        rows: which of its rows, from 0.

    Raises:
        InterruptedCacheError: a forward over the cache broke off half way.
    """
    engine.check_whole()
    clock, per_row = engine.clock, engine.wiring.lanes_per_row
    if not clock.tokens or [*rows] == [*range(len(clock.tokens))]:
        return
    lanes = [row * per_row + lane for row in rows for lane in range(per_row)]
    with engine.change():
        clock.select(rows)
        for layer in engine.layers:
            _select(layer, lanes)
        hide(engine)


def _select(layer: Layer, lanes: Sequence[int]) -> None:
    """Every lane keeps the slots that it uses.

    Free ones are given back: they were paid from what all rows had left over, so that a row that is named twice could
    hold more than its own budget.
    """
    layer.records = table.selected(layer.records, lanes)
    layer.live = tuple(tuple(own[lane] for lane in lanes) for own in layer.live)
    for segment, own in enumerate(layer.live):
        layer.repack(segment, own)
    index = to_device(lanes, layer.sink_keys.device)
    layer.sink_keys, layer.sink_values = layer.sink_keys[index], layer.sink_values[index]
    layer.shared = layer.shared.selected(index)
    if layer.asked is not None:
        layer.asked = Asked(layer.asked.vectors[index], layer.asked.positions[index])


def hide(engine: Engine) -> None:
    """Let attention see the tokens that the clock counts, and no more, after another change than a forward."""
    assert engine.clock.lengths is not None
    engine.stack = stack = Stack.of(engine.layers)
    stack.hide(stack.for_every_layer(per_lane(engine.clock.lengths, engine.wiring.lanes_per_row)))
