"""What a cache must hold, in plain Python: rows of lanes of windows, routed by the documented rules alone.

Nothing here imports the engine or its parts, except a rotary table, which is a value with laws and tests of its own.
Prices and budgets are given.
"""

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tests.plain_rows import UNRANKED, Held, Row, Rules, Window


@attrs.define(eq=False)
class Plain:
    """A cache.

    Attributes:
        rules: of its policy.
        rows: of its batch; none before the first forward.
        announced: length of the prompt, if it was said.
        prompted: the prompt is over.
        promotions: windows that moved to a hotter tier so far.
        demotions: to a colder one.
        evictions: out of the cache.
        whole: nothing was ever evicted or encoded.
    """

    rules: Rules
    rows: list[Row] = attrs.field(factory=list)
    announced: int = 0
    prompted: bool = False
    promotions: int = 0
    demotions: int = 0
    evictions: int = 0
    whole: bool = True

    @property
    def seen(self) -> int:
        return len(self.rows[0].slots) if self.rows else 0

    def copy(self) -> "Plain":
        return attrs.evolve(self, rows=[row.copy() for row in self.rows])

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row].copy() for row in rows]

    def open(self, rows: int, layers: int, kv_heads: int, head_dim: int) -> None:
        """Rows that have seen nothing."""
        nothing = torch.zeros(kv_heads, 0, head_dim)
        for _ in range(rows):
            lanes: list[list[dict[int, Window]]] = [[{} for _ in self.rules.heads] for _ in range(layers)]
            self.rows.append(Row([nothing] * layers, [nothing] * layers, lanes))

    def take(self, keys: Sequence[Tensor], values: Sequence[Tensor], valid: Sequence[Sequence[bool]]) -> None:
        """One forward: by layer ``[rows, kv_heads, slots, head_dim]``, and which slots of each row are tokens."""
        ends = not self.prompted and self.seen + len(valid[0]) >= self.announced
        for index, (row, own) in enumerate(zip(self.rows, valid, strict=True)):
            before = row.tokens
            row.slots += own
            real = torch.tensor(own)
            row.keys = [torch.cat((old, new[index][:, real]), 1) for old, new in zip(row.keys, keys, strict=True)]
            row.values = [torch.cat((old, new[index][:, real]), 1) for old, new in zip(row.values, values, strict=True)]
            self._count(row, before)
            self._finish(row, before, prompt_ends=ends)
        self.prompted = self.prompted or ends

    def _finish(self, row: Row, before: int, *, prompt_ends: bool) -> None:
        """The end of a forward, before which a row had so many tokens."""
        late = row.since >= self.rules.period or before < self.rules.least <= row.tokens
        due = prompt_ends or (self.prompted and late)
        row.ends.append((row.tokens, due))
        if due:
            self._route(row)

    def can_crop(self, slots: int) -> bool:
        """Whether the last slots can go as if they had never come."""
        kept = all(row.tokens == 0 or (row.tokens > slots and all(row.slots[-slots:])) for row in self.rows)
        untouched = self.prompted and min(row.since for row in self.rows) >= slots
        return slots < self.seen and kept and not self.rules.remembers and (untouched or self.whole)

    def crop(self, slots: int) -> None:
        """Forwards that the last slots came with end earlier, or never were."""
        whole = self.whole
        for row in self.rows:
            del row.slots[-slots:]
            left = row.tokens
            row.keys, row.values = ([own[:, :left] for own in layers] for layers in (row.keys, row.values))
            row.ends = [end for end in row.ends if end[0] <= left]
            last_event = max((own for own, due in row.ends if due), default=0)
            row.since = left - last_event
            if whole:
                row.ranked = self.rules.aged(last_event)
                row.lanes = [[dict(sorted(lane.items())[: row.ranked]) for lane in layer] for layer in row.lanes]
            before = row.ends[-1][0] if row.ends else 0
            if before < left:
                self._finish(row, before, prompt_ends=self.prompted and not last_event)

    def _count(self, row: Row, before: int) -> None:
        windows, sinks = self.rules.windows(row.tokens), self.rules.sinks
        row.turns += [0] * (windows - len(row.turns))
        came = max(0, row.tokens - sinks) - max(0, before - sinks)
        row.turns = [turns + came for turns in row.turns]
        row.since += row.tokens - before

    def _route(self, row: Row) -> None:
        row.since, old = 0, row.ranked
        row.ranked = max(old, self.rules.aged(row.tokens))
        for layer, lanes in enumerate(row.lanes):
            for heads, lane in zip(self.rules.heads, lanes, strict=True):
                for window in range(old, row.ranked):
                    lane[window] = Window(UNRANKED, self.original(row, layer, heads, window), {})
                self._place(row, layer, heads, lane)

    def original(self, row: Row, layer: int, heads: slice, window: int) -> Held:
        """What the model gave."""
        span = self.rules.span(window)
        return Held(row.keys[layer][heads, span], row.values[layer][heads, span])

    def _place(self, row: Row, layer: int, heads: slice, lane: dict[int, Window]) -> None:
        rules = self.rules
        order = sorted(lane, key=lambda window: (-rules.score(rules, row, layer, heads.start, window), window))
        capacity = rules.capacity(row.tokens, layer)
        filled, places = 0, dict.fromkeys(order, len(rules.shares))
        for tier, (share, price) in enumerate(zip(rules.shares, rules.prices, strict=True)):
            room = int(share * capacity / price + 1e-9) if capacity is not None else len(order) * (tier == 0)
            room -= sum(places[window] < tier and tier in lane[window].codes for window in order)
            room = max(0, room)
            places |= dict.fromkeys(order[filled : filled + room], tier)
            filled += room
        for window, place in places.items():
            self._move(row, lane, window, place)

    def _move(self, row: Row, lane: dict[int, Window], window: int, place: int) -> None:
        if place == len(self.rules.shares):
            del lane[window]
            self.evictions += 1
            self.whole = False
            return
        own, positions = lane[window], self._rotary_positions(row, window)
        came_from = max(own.place, 0)
        self.promotions += place < came_from
        self.demotions += place > came_from
        own.moves += place != came_from
        own.place = place
        if self.rules.bits[place] is None:
            own.full = own.full or Held(own.best.keys, own.best.values)
            return
        self.whole = False
        if place not in own.codes:
            own.codes[place] = self._encode(own.best, place, positions)
        own.full = None
        own.codes = {tier: codes for tier, codes in own.codes.items() if tier >= place}

    def _encode(self, best: Held, tier: int, positions: Tensor) -> Held:
        bits, rotary = self.rules.bits[tier], self.rules.rotary
        assert bits is not None
        bare = rotary.unrotate(best.keys, positions) if best.decoded is None else best.decoded
        keys = on_grid(bare, bits, along=1)
        return Held(rotary.rotate(keys, positions), on_grid(best.values, bits, along=2), keys)

    def _rotary_positions(self, row: Row, window: int) -> Tensor:
        span = self.rules.span(window)
        return torch.arange(span.start, span.stop) + row.offset

    def kept(self, row: Row, layer: int, lane: int) -> list[int]:
        """True positions that a lane holds."""
        windows = [*row.lanes[layer][lane], *range(row.ranked, self.rules.windows(row.tokens))]
        spans = [range(row.tokens)[self.rules.span(window)] for window in sorted(windows)]
        return [*range(min(self.rules.sinks, row.tokens)), *(position for span in spans for position in span)]

    def held(self, row: Row, layer: int, lane: int) -> tuple[Tensor, Tensor]:
        """Keys and values that attention reads in a lane, ``[heads, tokens, head_dim]``, in order of position."""
        heads, sinks = self.rules.heads[lane], self.rules.sinks
        ranked = [own.best for _, own in sorted(row.lanes[layer][lane].items())]
        rest = sinks + row.ranked * self.rules.window
        keys, values = row.keys[layer][heads], row.values[layer][heads]
        return (
            torch.cat((keys[:, :sinks], *(own.keys for own in ranked), keys[:, rest:]), 1),
            torch.cat((values[:, :sinks], *(own.values for own in ranked), values[:, rest:]), 1),
        )

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, valid: Sequence[Sequence[bool]]
    ) -> Tensor:
        """What a forward's attention must give, before :meth:`take`: ``[rows, slots, q_heads, head_dim]``, pads 0."""
        given = torch.zeros_like(query).transpose(1, 2)
        group = query.shape[1] // keys.shape[1]
        for index, (row, own) in enumerate(zip(self.rows, valid, strict=True)):
            real = torch.tensor(own)
            for lane, heads in enumerate(self.rules.heads):
                known, told = self.held(row, layer, lane)
                known, told = (
                    torch.cat((known, keys[index, heads, real]), 1),
                    torch.cat((told, values[index, heads, real]), 1),
                )
                asked = slice(heads.start * group, heads.stop * group)
                answer = _attention(query[index, asked][:, real], known, told, group)
                given[index, real, asked] = answer.transpose(0, 1)
        return given


def _attention(query: Tensor, keys: Tensor, values: Tensor, group: int) -> Tensor:
    """Causal attention of ``[q_heads, new, head_dim]`` over the new tokens and those before."""
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    logits = query @ keys.transpose(1, 2) * query.shape[-1] ** -0.5
    later = torch.ones(logits.shape[1:], dtype=torch.bool).triu(logits.shape[2] - logits.shape[1] + 1)
    answer: Tensor = logits.masked_fill(later, -torch.inf).softmax(-1) @ values
    return answer


def on_grid(x: Tensor, bits: int, along: int) -> Tensor:
    """Round to a min-max grid per group along an axis, its scale and zero point rounded outwards to half precision."""
    data = x.numpy()
    zero = _outwards(data.min(along, keepdims=True), -np.inf)
    scale = _outwards((data.max(along, keepdims=True) - zero) / np.float32(2**bits - 1), np.inf)
    codes = np.rint((data - zero) / np.where(scale > 0, scale, np.float32(1))).clip(0, 2**bits - 1)
    return torch.from_numpy(zero + codes * scale)


def _outwards(x: npt.NDArray[np.float32], towards: float) -> npt.NDArray[np.float32]:
    near = x.astype(np.float16)
    beyond = near.astype(np.float32) > x if towards < 0 else near.astype(np.float32) < x
    return np.where(beyond, np.nextafter(near, np.float16(towards)), near).astype(np.float32)
