"""Tokens taken back: exactly as if they had never come, or not at all."""

from collections.abc import Sequence

from qevict.engine import records as table
from qevict.engine.clock import refuse
from qevict.engine.engine import Engine
from qevict.engine.event import check_reserve
from qevict.engine.landing import land
from qevict.engine.layer import with_slack
from qevict.engine.selection import hide
from qevict.errors import UnsupportedOperationError

_REMEDY = "fork the cache before tokens that you may take back, and go on with the fork"


def crop(engine: Engine, slots: int) -> None:
    """Take back the last tokens of every row.

    What a scorer has added up cannot be taken apart, and what an event has moved cannot be moved back. So this works
    for scorers that remember nothing, if no event came with or after these tokens, or if everything is still whole.
    Then windows are opened and aged, and events fall due, as in a cache that these tokens were never given to.

    Args:
        engine: the cache's.
        slots: how many tokens, pads included; at least 1.

    Raises:
        InputError: some row would be left without a token, or has a pad among those to take back.
        UnsupportedOperationError: it cannot be done exactly.
        BudgetExceededError: the policy is strict, and shorter rows have too small a budget.
        InterruptedCacheError: a forward over the cache broke off half way.
    """
    engine.check_whole()
    clock, tokens = engine.clock, engine.clock.before(slots)
    scorer = engine.wiring.policy.scorer
    if any(layer.records.state for layer in engine.layers):
        msg = f"crop cannot be exact: scorer {scorer.name!r} has weighed these tokens, and adds up what it is shown"
        raise UnsupportedOperationError(f"{msg}; {_REMEDY}")
    if clock.prompted and min(clock.since) >= slots:
        last = [(own - since, False) for own, since in zip(clock.tokens, clock.since, strict=True)]
        clock.cut(slots, tokens, last)
        hide(engine)
    elif engine.whole and engine.wiring.policy.route_at == "period":
        _rewind(engine, slots, tokens)
    else:
        msg = (
            f"crop cannot be exact: {slots} tokens cannot be taken back, since a routing event came {min(clock.since)} "
            f"tokens ago and has moved what came before"
        )
        raise UnsupportedOperationError(f"{msg}; {_REMEDY}")


def _rewind(engine: Engine, slots: int, tokens: Sequence[int]) -> None:
    """Back to an earlier length of which nothing has been given up; hold the event that then falls at its end."""
    clock, wiring = engine.clock, engine.wiring
    assert clock.faults is not None
    refuse(*clock.faults.tolist())
    last = clock.last_events(tokens)
    for own, (_, due) in zip(tokens, last, strict=True):
        for budget in wiring.lane_budgets(own) if due else ():
            check_reserve(wiring, budget)
    with engine.change():
        clock.cut(slots, tokens, last)
        assert clock.lengths is not None
        for layer in engine.layers:
            until = layer.lane_counts([wiring.windows_until(own) for own in tokens])
            aged = layer.lane_counts([wiring.aged_until(own) for own, _ in last])
            layer.records = table.cut(layer.records, until, aged)
            layer.live = (tuple(until), *layer.live[1:])
            layer.repack(0, [with_slack(own) for own in until])
            if layer.asked is not None:
                layer.asked = layer.asked.until(layer.lane_tensor(clock.lengths))
        hide(engine)
        if clock.prompted:
            _make_room(engine, [due for _, due in last])


def _make_room(engine: Engine, due: Sequence[bool]) -> None:
    """What an event without tokens does: it routes the rows that are due, and opens windows for all."""
    clock = engine.clock
    assert clock.offset is not None
    arrival = clock.still(due)
    landing = land(engine.wiring, arrival, clock.offset)
    engine.route_together(range(len(engine.layers)), arrival, landing, ask=False)
    if not engine.whole:
        clock.events = ()
