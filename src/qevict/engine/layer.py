"""One layer's storage: pools, records and sinks, and what reads and appends to them."""

from collections.abc import Sequence
from typing import TypeVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import EncodedSegment, Query, View
from qevict.contracts.scorer import State
from qevict.contracts.store import Pool
from qevict.contracts.values import PROTECTED, Codes, Windows
from qevict.engine import records as table
from qevict.engine.clock import Arrival
from qevict.engine.records import Grid, Records
from qevict.engine.wiring import Wiring
from qevict.transfer import to_device

_T = TypeVar("_T")


@attrs.define(eq=False)
class Totals:
    """Windows moved since the cache was made, over all lanes."""

    promotions: int = 0
    demotions: int = 0
    evictions: int = 0


@attrs.define(eq=False)
class Layer:
    """The mutable state of one layer.

    Attributes:
        wiring: sizes and prices.
        pools: the dense pool, then one for each encoded tier.
        sink_keys: ``[lanes, heads, sinks, head_dim]``.
        sink_values: likewise.
        records: one line per live window.
        live: slots in use in each pool, known on the host.
        whole: every token is still held as the model gave it, or rounded once to the stored dtype.
        totals: windows moved so far.
    """

    wiring: Wiring
    pools: tuple[Pool, ...]
    sink_keys: Tensor
    sink_values: Tensor
    records: Records
    live: tuple[int, ...]
    whole: bool = True
    totals: Totals = attrs.field(factory=Totals)

    @classmethod
    def open(cls, wiring: Wiring, rows: int, device: torch.device) -> "Layer":
        """An empty layer for that many rows."""
        lanes = rows * wiring.lanes_per_row
        policy, geometry = wiring.policy, wiring.geometry
        stores = (policy.tiers[0].store, *(tier.store for tier in policy.tiers if tier.codec is not None))
        pools = tuple(
            store.open(layout, wiring.heads, device) for store, layout in zip(stores, wiring.layouts, strict=True)
        )
        sinks = torch.zeros(
            lanes, wiring.heads, policy.sink_tokens, geometry.head_dim, dtype=geometry.dtype, device=device
        )
        state = policy.scorer.start(1, 0, device)
        return cls(
            wiring,
            pools,
            sinks,
            sinks.clone(),
            table.empty(lanes, wiring.segments, state, device),
            (0,) * wiring.segments,
        )

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.records.lanes

    @property
    def nbytes(self) -> int:
        """Bytes of everything this layer has allocated."""
        pools = sum(pool.nbytes for pool in self.pools)
        return pools + self.sink_keys.nbytes + self.sink_values.nbytes + self.records.nbytes

    @property
    def coded(self) -> bool:
        """Some tier holds codes, so that some window may own codes beside its place."""
        return any(pool.capacity for pool in self.pools[1:])

    def by_lane(self, tensor: Tensor) -> Tensor:
        """``[rows, kv_heads, ...]`` as ``[lanes, heads, ...]``."""
        return tensor.reshape(self.lanes, self.wiring.heads, *tensor.shape[2:])

    def per_lane(self, rows: Tensor) -> Tensor:
        """A tensor over rows, repeated for each of their lanes."""
        return rows.repeat_interleave(self.wiring.lanes_per_row, dim=0)

    def lane_counts(self, rows: Sequence[_T]) -> list[_T]:
        """Host values over rows, repeated for each of their lanes."""
        return [count for count in rows for _ in range(self.wiring.lanes_per_row)]

    def free_slots(self, segment: int, count: int) -> Tensor:
        """``count`` slots of a pool that no line owns."""
        capacity = self.pools[segment].capacity
        slots = self.records.slots
        used = torch.zeros(capacity + 1, dtype=torch.bool, device=slots.device)
        used[slots[:, segment].long()] = True  # -1 marks the spare last entry
        return torch.nonzero_static(~used[:capacity], size=count)[:, 0]

    def open_windows(self, until: Sequence[int]) -> None:
        """Make room for protected windows up to ``until`` in every lane; grows the dense pool if it must."""
        goals = [max(goal, old) for goal, old in zip(until, self.records.opened, strict=True)]
        new = sum(goals) - sum(self.records.opened)
        if new == 0:
            return
        need = self.live[0] + new
        if need > self.pools[0].capacity:
            self.repack(0, with_slack(need))
        device = self.records.window.device
        slots = self.free_slots(0, new)
        state = self.wiring.policy.scorer.start(1, new, device)
        self.records = table.opened_until(self.records, goals, slots, state)
        self.live = (need, *self.live[1:])

    def repack(self, segment: int, capacity: int) -> None:
        """Lay a pool out anew with another capacity; its live windows move to the first slots."""
        slots = self.records.slots
        owners = torch.nonzero_static(slots[:, segment] >= 0, size=self.live[segment])[:, 0]
        self.pools[segment].repack(slots[owners, segment].long(), capacity)
        slots[owners, segment] = torch.arange(owners.shape[0], dtype=torch.int32, device=slots.device)

    def append(self, keys: Tensor, values: Tensor, arrival: Arrival) -> Tensor:
        """Write a forward's keys and values where they belong; pads go nowhere.

        Returns:
            ``[lanes, tokens]`` the table's line of the window that each token fell into; -1 for sinks and pads.
        """
        if arrival.tokens > 1 or arrival.in_prompt:  # a routing event leaves room for the single tokens until the next
            self.open_windows(self.lane_counts([self.wiring.windows_until(tokens) for tokens in arrival.after]))
        positions = self.per_lane(arrival.positions)
        sinks, lanes_per_row = self.wiring.policy.sink_tokens, self.wiring.lanes_per_row
        rows = list(zip(arrival.before, arrival.after, strict=True))
        for_sinks = sum(min(sinks, new) - min(sinks, old) for old, new in rows) * lanes_per_row
        if for_sinks:
            self._append_sinks(keys, values, positions, for_sinks)
        for_windows = sum(new - old for old, new in rows) * lanes_per_row - for_sinks
        return self._append_windows(keys, values, positions, for_windows)

    def _append_sinks(self, keys: Tensor, values: Tensor, positions: Tensor, count: int) -> None:
        inside = (positions >= 0) & (positions < self.wiring.policy.sink_tokens)
        lane, token = torch.nonzero_static(inside, size=count).unbind(1)
        position = positions[lane, token]
        self.sink_keys[lane, :, position] = keys[lane, :, token].to(self.sink_keys.dtype)
        self.sink_values[lane, :, position] = values[lane, :, token].to(self.sink_values.dtype)

    def _append_windows(self, keys: Tensor, values: Tensor, positions: Tensor, count: int) -> Tensor:
        policy, records = self.wiring.policy, self.records
        inside = positions - policy.sink_tokens
        window = torch.div(inside, policy.window_tokens, rounding_mode="floor")
        ends = records.starts[:, 0] + records.sizes[:, 0]
        # Windows not yet aged are the last lines of a lane's dense segment, without a gap.
        line = torch.where(inside >= 0, (ends - records.opened_on_device)[:, None] + window, -1)
        lane, token = torch.nonzero_static(inside >= 0, size=count).unbind(1)
        slot = records.slots[line[lane, token], 0].long()
        offset = inside[lane, token] % policy.window_tokens
        dense = self.pools[0].lend()
        for name, vectors in (("keys", keys), ("values", values)):
            pool = dense[name]
            pool[:, slot, offset] = vectors[lane, :, token].transpose(0, 1).to(pool.dtype)
        return line

    def history(self, tokens: int) -> tuple[Tensor, Tensor]:
        """All keys and values in order, ``[rows, kv_heads, tokens, head_dim]``; only while whole and without pads."""
        grid = self.records.grid()
        slots = grid.spread(self.records.slots[:, 0])[:, : grid.widths[0]].long()
        dense = self.pools[0].lend()
        rows = self.lanes // self.wiring.lanes_per_row
        whole = []
        for name, sinks in (("keys", self.sink_keys), ("values", self.sink_values)):
            blocks = dense[name][:, slots].transpose(0, 1).flatten(2, 3)
            joined = torch.cat((sinks, blocks), dim=2) if sinks.shape[2] else blocks
            whole.append(joined[:, :, :tokens].reshape(rows, self.wiring.geometry.kv_heads, tokens, -1))
        return whole[0], whole[1]

    def view(self, grid: Grid, arrival: Arrival, offset: Tensor) -> View:
        """What attention reads, lent without a copy."""
        dense = self.pools[0].lend()
        slots = grid.spread(self.records.slots).long().clamp_(min=0)
        return View(
            sink_keys=self.sink_keys,
            sink_values=self.sink_values,
            keys=dense["keys"],
            values=dense["values"],
            slots=slots[:, : grid.widths[0], 0],
            encoded=self._encoded(grid, slots),
            positions=self.window_positions(grid),
            present=grid.present,
            lengths=self.per_lane(arrival.lengths),
            rotary=self.wiring.rotary,
            rotary_offset=self.per_lane(offset),
        )

    def _encoded(self, grid: Grid, slots: Tensor) -> tuple[EncodedSegment, ...]:
        segments, column = [], grid.widths[0]
        for index, (keys, values) in enumerate(self.wiring.codecs, start=1):
            until = column + grid.widths[index]
            if until > column:
                lent = self.pools[index].lend()
                own = slots[:, column:until, index]
                segments.append(EncodedSegment(keys, values, part(lent, "keys."), part(lent, "values."), own))
            column = until
        return tuple(segments)

    def window_positions(self, grid: Grid) -> Tensor:
        """First true position of each window, ``[lanes, columns]``."""
        policy = self.wiring.policy
        return grid.spread(self.records.window).long() * policy.window_tokens + policy.sink_tokens

    def query(self, vectors: Tensor, positions: Tensor, scaling: float) -> Query:
        """Queries ``[rows, q_heads, tokens, head_dim]`` at ``[rows, tokens]`` true positions, by lane and KV head."""
        group = self.wiring.geometry.q_heads // self.wiring.geometry.kv_heads
        lanes = vectors.reshape(self.lanes, self.wiring.heads, group, *vectors.shape[2:])
        return Query(lanes, self.per_lane(positions), scaling)

    def kept_positions(self, rows: Sequence[int]) -> list[list[int]]:
        """True positions held, lane by lane, given the true tokens of each row; asks the device."""
        policy = self.wiring.policy
        windows: list[list[int]] = [[] for _ in range(self.lanes)]
        for lane, window in zip(self.records.lane_of().tolist(), self.records.window.tolist(), strict=True):
            windows[lane].append(policy.sink_tokens + window * policy.window_tokens)
        kept = []
        for tokens, starts in zip(self.lane_counts(rows), windows, strict=True):
            inside = (start + step for start in sorted(starts) for step in range(policy.window_tokens))
            kept.append([*range(min(tokens, policy.sink_tokens)), *(own for own in inside if own < tokens)])
        return kept

    def windows(self, grid: Grid, arrival: Arrival) -> Windows:
        """What a router may place at this event."""
        due = self.lane_counts(arrival.due)
        aged = [
            self.wiring.aged_until(tokens) if now else 0
            for tokens, now in zip(self.lane_counts(arrival.after), due, strict=True)
        ]
        limit = to_device(aged, grid.present.device)
        window, place = grid.spread(self.records.window), grid.spread(self.records.place)
        live = [sum(lane) for lane in zip(*self.records.counts, strict=True)]
        unranked = [opened - until for opened, until in zip(self.records.opened, aged, strict=True)]
        candidates = tuple(total - rest if now else 0 for total, rest, now in zip(live, unranked, due, strict=True))
        return Windows(
            positions=self.window_positions(grid),
            present=grid.present,
            candidate=grid.present & (window < limit[:, None]),
            place=torch.where(grid.present, place, PROTECTED).long(),
            candidates=candidates,
        )

    def state(self, grid: Grid) -> State:
        """The scorer's state as a rectangle; absent columns are as if nothing had been observed."""
        lanes, columns = grid.present.shape
        fresh = self.wiring.policy.scorer.start(lanes, columns, grid.present.device)
        spread = {}
        for name, column in self.records.state.items():
            present = grid.present.view(*grid.present.shape, *(1,) * (column.ndim - 1))
            spread[name] = torch.where(present, grid.spread(column), fresh[name])
        return spread

    def remember(self, grid: Grid, state: State) -> None:
        """Write the scorer's state back."""
        lines = self.records.lines
        columns = {name: grid.collect(rectangle, lines) for name, rectangle in state.items()}
        self.records = attrs.evolve(self.records, state=columns)


def with_slack(need: int) -> int:
    """A capacity that makes growth amortised: one sixteenth more than is needed."""
    return need + need // 16


def part(codes: Codes, prefix: str) -> Codes:
    """The arrays of keys, or of values, under their quantizer's own names."""
    return {name.removeprefix(prefix): array for name, array in codes.items() if name.startswith(prefix)}
