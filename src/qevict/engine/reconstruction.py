"""A prompt that is repeated behind itself, to see what of it the repetition needs; nothing of that is stored."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from qevict.backends.logits import capped
from qevict.backends.reference import gather
from qevict.contracts.values import Observation
from qevict.engine.checks import check_state
from qevict.engine.clock import Clock
from qevict.engine.engine import Engine
from qevict.engine.forward import Incoming
from qevict.engine.landing import Landing, land, per_lane
from qevict.engine.layer import Layer
from qevict.engine.stack import Stack
from qevict.transfer import to_device


@attrs.frozen(eq=False)
class Repetition:
    """Stands where a cache's engine stands, for a forward that repeats a part of its prompt behind it.

    The model attends to the whole prompt and to the forward's own tokens. The scorer is shown a softmax over the
    repeated part, the sinks before it and these tokens alone, as KVzip has it.

    Attributes:
        engine: the cache's, with its prompt read and not ended.
        starts: by row, true position of the first repeated token.
        ends: likewise behind the last one.
        landing: of no token, the same for all layers.
    """

    engine: Engine
    starts: Sequence[int]
    ends: Sequence[int]
    landing: Landing = attrs.field(init=False)

    @landing.default
    def _nowhere(self) -> Landing:
        assert self.engine.clock.offset is not None
        return land(self.engine.wiring, self.engine.clock.still(), self.engine.clock.offset)

    @property
    def clock(self) -> Clock:
        """How far each row is, the repetition not counted."""
        return self.engine.clock

    def step(self, index: int, incoming: Incoming) -> Tensor:
        """One layer's part of the forward."""
        layer = self.engine.layers[index]
        keys, values = _prompt(layer, self.landing, self.clock)
        output = incoming.native(
            torch.cat((keys.to(incoming.keys.dtype), incoming.keys), 2),
            torch.cat((values.to(incoming.values.dtype), incoming.values), 2),
        )
        self._score(layer, keys, incoming)
        return output

    def _score(self, layer: Layer, keys: Tensor, incoming: Incoming) -> None:
        stack, policy, device = Stack.of([layer]), layer.wiring.policy, keys.device
        starts, ends = to_device([*self.starts], device), to_device([*self.ends], device)
        width = max(end - start for start, end in zip(self.starts, self.ends, strict=True))
        positions = starts[:, None] + torch.arange(width, device=device)
        inside = positions < ends[:, None]
        pads = to_device([self.clock.seen - own for own in self.clock.tokens], device)
        slots = (positions + pads[:, None]).clamp(max=self.clock.seen - 1)
        part = keys.gather(2, slots[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3]))
        sinks = _Sinks(layer.sink_keys.reshape(*keys.shape[:2], -1, keys.shape[3]), [*self.starts])
        highest = _highest(part, inside, sinks, incoming)
        window = torch.div(positions - policy.sink_tokens, policy.window_tokens, rounding_mode="floor")
        window = per_lane(torch.where(inside, window, -1), layer.wiring.lanes_per_row)
        grid, columns = stack.grid(), stack.records.columns_of(window)
        shown = highest.reshape(layer.lanes, layer.wiring.heads, -1, width)
        observation = Observation(
            columns=columns,
            windows=grid.shape[1],
            lanes_per_row=layer.wiring.lanes_per_row,
            reconstruction=_by_window(shown, columns, grid.shape[1]),
        )
        state = policy.scorer.update(stack.state(grid), observation)
        check_state(policy.scorer.name, state, stack.records.state, grid.shape)
        stack.remember(grid, state)


def _prompt(layer: Layer, landing: Landing, clock: Clock) -> tuple[Tensor, Tensor]:
    """Keys and values of the prompt as the model's own cache would hold them, pads (of any content) in their places."""
    gathered = gather(layer.view(landing))
    pads = to_device([clock.seen - own for own in clock.tokens], gathered.keys.device)
    slots = torch.arange(clock.seen, device=pads.device) - per_lane(pads, layer.wiring.lanes_per_row)[:, None]
    held = []
    for vectors in (gathered.keys, gathered.values):
        index = slots.clamp(min=0)[:, None, :, None].expand(-1, vectors.shape[1], -1, vectors.shape[3])
        held.append(vectors.gather(2, index).reshape(len(clock.tokens), -1, clock.seen, vectors.shape[3]))
    return held[0], held[1]


@attrs.frozen(eq=False)
class _Sinks:
    """The first tokens of each row, which take part in the softmax of all pieces but the first, and keep their share.

    Attributes:
        keys: ``[rows, kv_heads, sinks, head_dim]``.
        before: by row, true position of the piece; sinks before it are seen beside it.
    """

    keys: Tensor
    before: list[int]


def _highest(part: Tensor, inside: Tensor, sinks: _Sinks, incoming: Incoming) -> Tensor:
    """``[rows, q_heads, part]`` the highest probability that any query gives a token of the part.

    One KV head and row at a time, since the logits of all would be large.
    """
    rows, q_heads, count, _ = incoming.query.shape
    group, width = q_heads // part.shape[1], part.shape[2]
    real = torch.ones(rows, count, dtype=torch.bool, device=part.device) if incoming.valid is None else incoming.valid
    causal = torch.ones(count, count, dtype=torch.bool, device=part.device).tril()
    highest = torch.empty(rows, q_heads, width, dtype=torch.float32, device=part.device)
    for row in range(rows):
        beside = sinks.keys[row, :, : sinks.before[row]]
        shown = torch.cat((inside[row], inside.new_ones(beside.shape[1])))
        seen = torch.cat((shown.expand(count, -1), causal & real[row]), dim=1)
        for head in range(part.shape[1]):
            own = slice(head * group, (head + 1) * group)
            keys = torch.cat((part[row, head].float(), beside[head].float(), incoming.keys[row, head].float()))
            logits = capped(incoming.query[row, own].float() @ keys.T * incoming.scaling, incoming.softcap)
            learned = None if incoming.sink_logits is None else incoming.sink_logits[own]
            probability = _softmax(logits.masked_fill(~seen, -torch.inf), learned)[..., :width]
            counted = probability.masked_fill(~real[row, :, None], 0).masked_fill(~inside[row], 0)
            highest[row, own] = counted.amax(dim=1)
    return highest


def _softmax(logits: Tensor, learned: Tensor | None) -> Tensor:
    """With the sink logits that a model may have learned, which carry no value."""
    if learned is None:
        return logits.softmax(-1)
    with_sink = torch.cat((logits, learned.float()[:, None, None].expand(*logits.shape[:2], 1)), dim=-1)
    return with_sink.softmax(-1)[..., :-1]


def _by_window(highest: Tensor, columns: Tensor, windows: int) -> Tensor:
    """``[lanes, heads, group, windows]`` the highest of each window's tokens; 0 where none was repeated."""
    into = torch.where(columns < 0, windows, columns)[:, None, None].expand_as(highest)
    found = highest.new_zeros(*highest.shape[:3], windows + 1)
    return found.scatter_reduce_(3, into, highest, "amax")[..., :windows]
