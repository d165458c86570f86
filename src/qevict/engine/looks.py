"""Which queries of a forward the scorer is told the masses of; decided on the host, once for all layers."""

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import Known
from qevict.contracts.scorer import Scorer
from qevict.engine.clock import Arrival, Clock
from qevict.engine.landing import per_lane
from qevict.engine.wiring import Wiring
from qevict.transfer import to_device


@attrs.frozen(eq=False)
class Look:
    """The queries of one forward that are looked at.

    Attributes:
        slots: which of the forward's slots.
        positions: ``[lanes, slots]`` their true positions; -1 for pads, and in lanes that are not looked at.
        stands_for: how many queries each of them stands for.
        everything: no query of the forward is left out.
        nothing: the scorer wants no look at this forward.
        known: what the host knows of the positions while a layer is whole.
        first: by row, whether these are the first queries looked at since the row's last event.
    """

    slots: slice
    positions: Tensor
    stands_for: float = 1.0
    everything: bool = False
    nothing: bool = False
    known: Known = attrs.field(factory=Known)
    first: tuple[bool, ...] = ()


def look_at(wiring: Wiring, clock: Clock, arrival: Arrival) -> Look:
    """The queries of this forward that count for a policy's scorer."""
    look = _look(wiring.policy.scorer, clock, arrival, once=wiring.policy.route_at == "prompt")
    return attrs.evolve(look, positions=per_lane(look.positions, wiring.lanes_per_row), known=_known(look, arrival))


def _known(look: Look, arrival: Arrival) -> Known:
    """Bounds of positions, which pads move to the left in all rows alike."""
    stride = look.slots.step or 1
    slots = range(arrival.tokens)[look.slots]
    behind = arrival.tokens - 1 - slots[-1] if slots else 0
    return Known(longest=max(arrival.after), shortest=max(0, min(arrival.after) - behind), spacing=stride)


def _look(scorer: Scorer, clock: Clock, arrival: Arrival, *, once: bool) -> Look:
    """With ``once``, nothing is ranked behind the prompt, and so nothing is looked at."""
    if not clock.prompted:
        return _in_prompt(scorer, clock.prompt_tokens or 0, arrival)
    if once:
        return Look(slice(arrival.tokens, None), arrival.positions[:, :0], nothing=True)
    if scorer.observe_tokens is None:
        first = tuple(since == 0 and new > 0 for since, new in zip(clock.since, _new(arrival), strict=True))
        return Look(slice(0, None), arrival.positions, everything=True, first=first)
    return _before_events(scorer.observe_tokens, clock, arrival)


def _in_prompt(scorer: Scorer, announced: int, arrival: Arrival) -> Look:
    """Every n-th of the prompt's last queries, counted from its end, which is the same slot in all rows and chunks."""
    end, stride = max(announced, arrival.start + arrival.tokens), scorer.prompt_stride
    last = end if scorer.prompt_queries is None else scorer.prompt_queries
    first = min(max(0, end - last - arrival.start), arrival.tokens)
    first += (end - 1 - arrival.start - first) % stride
    slots = slice(first, None, stride)
    return Look(slots, arrival.positions[:, slots], float(stride), everything=first == 0 and stride == 1)


def _before_events(last: int, clock: Clock, arrival: Arrival) -> Look:
    """The last tokens of each row before its next event, be it at the end of this forward or later."""
    rows = zip(arrival.after, arrival.due, arrival.left, strict=True)
    since = [_next_event(clock, *row) - last for row in rows]
    new = _new(arrival)
    seen = [min(count, max(0, after - start)) for count, after, start in zip(new, arrival.after, since, strict=True)]
    first = tuple(before <= start and n > 0 for before, start, n in zip(arrival.before, since, seen, strict=True))
    slots, stands_for = slice(arrival.tokens - max(seen), None), clock.period_tokens / last
    positions = arrival.positions[:, slots]
    if not max(seen):
        return Look(slots, positions, stands_for, nothing=True)
    if seen == new:
        return Look(slice(0, None), arrival.positions, stands_for, everything=True, first=first)
    start = to_device(since, positions.device)[:, None]
    return Look(slots, torch.where(positions < start, -1, positions), stands_for, first=first)


def _new(arrival: Arrival) -> list[int]:
    return [after - before for before, after in zip(arrival.before, arrival.after, strict=True)]


def _next_event(clock: Clock, after: int, due: bool, left: int) -> int:  # noqa: FBT001 - the fields of an arrival
    """How long a row will be at its next event, if its tokens come one by one."""
    if due:
        return after
    return min(after + left, clock.min_tokens) if after < clock.min_tokens else after + left
