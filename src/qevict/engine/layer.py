"""One layer's storage: pools, records and sinks, and what reads and appends to them."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import EncodedSegment, Query, View
from qevict.contracts.store import Pool
from qevict.contracts.values import Codes
from qevict.engine import records as table
from qevict.engine.landing import Landing, per_lane
from qevict.engine.records import Grid, Records
from qevict.engine.shared import Shared
from qevict.engine.waiting import Asked
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
        index: which of the layers that the policy rules it is.
        pools: the dense pool, then one for each encoded tier.
        sink_keys: ``[lanes, heads, sinks, head_dim]``.
        sink_values: likewise.
        records: one line per live window.
        regions: by pool and lane, the slots that belong to the lane; the regions of a pool follow one another.
        live: by pool and lane, the slots in use.
        hidden: by pool, what attention must not see: tokens of the dense pool, slots of the others.
        shared: what the codes of a lane have in common.
        whole: every token is still held as the model gave it, or rounded once to the stored dtype.
        totals: windows moved so far.
        asked: queries that a scorer wants to see at the prompt's end, while it is read in pieces.
        lent: makes the view of a forward, where nothing of it has to be copied; None if it is to be put together.
    """

    wiring: Wiring
    index: int
    pools: tuple[Pool, ...]
    sink_keys: Tensor
    sink_values: Tensor
    records: Records
    regions: table.Counts
    live: table.Counts
    hidden: tuple[Tensor, ...]
    shared: Shared
    whole: bool = True
    totals: Totals = attrs.field(factory=Totals)
    asked: Asked | None = None
    lent: "partial[View] | None" = None

    @classmethod
    def open(cls, wiring: Wiring, index: int, rows: int, device: torch.device) -> "Layer":
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
            index,
            pools,
            sinks,
            sinks.clone(),
            table.empty(lanes, wiring.segments, state, device),
            regions=((0,) * lanes,) * wiring.segments,
            live=((0,) * lanes,) * wiring.segments,
            hidden=(torch.ones(0, dtype=torch.bool, device=device),) * wiring.segments,
            shared=Shared.open(wiring, lanes, device),
        )

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.records.lanes

    @property
    def nbytes(self) -> int:
        """Bytes of everything this layer has allocated."""
        pools = sum(pool.nbytes for pool in self.pools)
        hidden = sum(mask.nbytes for mask in self.hidden)
        asked = 0 if self.asked is None else self.asked.nbytes
        sinks = self.sink_keys.nbytes + self.sink_values.nbytes
        return pools + sinks + self.records.nbytes + hidden + asked + self.shared.nbytes

    @property
    def coded(self) -> bool:
        """Some tier holds codes, so that some window may own codes beside its place."""
        return any(pool.capacity for pool in self.pools[1:])

    def by_lane(self, tensor: Tensor) -> Tensor:
        """``[rows, kv_heads, ...]`` as ``[lanes, heads, ...]``."""
        if self.wiring.lanes_per_row == 1:
            return tensor
        return tensor.reshape(self.lanes, self.wiring.heads, *tensor.shape[2:])

    def lane_counts(self, rows: Sequence[_T]) -> list[_T]:
        """Host values over rows, repeated for each of their lanes."""
        return [count for count in rows for _ in range(self.wiring.lanes_per_row)]

    def lane_tensor(self, rows: Tensor) -> Tensor:
        """A tensor over rows, repeated for each of their lanes."""
        return per_lane(rows, self.wiring.lanes_per_row)

    def repack(self, segment: int, regions: Sequence[int]) -> None:
        """Lay a pool out anew with other regions; a lane's live windows move to its first slots, in order."""
        self.lent = None  # which would keep the old arrays until all layers have moved
        self.regions = (*self.regions[:segment], tuple(regions), *self.regions[segment + 1 :])
        slots, live = self.records.slots, sum(self.live[segment])
        owners = torch.nonzero_static(slots[:, segment] >= 0, size=live)[:, 0]
        lanes = self.records.lane_of()[owners]
        ends = [*itertools.accumulate(regions, initial=0)]
        into = to_device(ends[:-1], slots.device)[lanes] + rank_in_lane(lanes)
        self.pools[segment].repack(slots[owners, segment].long(), into, ends[-1])
        slots[owners, segment] = into.int()

    def append(self, keys: Tensor, values: Tensor, landing: Landing, places: Tensor) -> None:
        """Write a forward's keys and values where they belong.

        Args:
            keys: ``[lanes, heads, tokens, head_dim]``.
            values: likewise.
            landing: where the tokens fall.
            places: of those that fall into windows, in the dense pool, from :meth:`Stack.admit`.
        """
        if landing.of_sinks is not None:
            lane = landing.of_sinks.lane
            position = landing.positions[lane, landing.of_sinks.token]
            for sinks, vectors in ((self.sink_keys, keys), (self.sink_values, values)):
                sinks[lane, :, position] = landing.of_sinks.vectors(vectors).to(sinks.dtype)
        dense = self.pools[0].lend()
        for name, vectors in (("keys", keys), ("values", values)):
            pool = dense[name]
            tokens = pool.view(pool.shape[0], -1, pool.shape[3])
            tokens.index_copy_(1, places, landing.vectors(vectors).to(pool.dtype))

    @property
    def in_order(self) -> bool:
        """The dense pool holds all tokens of every lane side by side, so that the model's own attention can read it."""
        return self.whole and not self.wiring.policy.sink_tokens and len({*self.regions[0]}) == 1

    def history(self, tokens: int) -> tuple[Tensor, Tensor]:
        """All keys and values in order, ``[rows, kv_heads, tokens, head_dim]``; only while whole and without pads.

        Lent without a copy if the layer is :attr:`in_order`.
        """
        dense, rows = self.pools[0].lend(), self.lanes // self.wiring.lanes_per_row
        whole = []
        for name, sinks in (("keys", self.sink_keys), ("values", self.sink_values)):
            if self.in_order:
                joined = dense[name].unflatten(1, (self.lanes, -1)).flatten(2, 3).transpose(0, 1)
            else:
                grid = self.records.grid()
                slots = grid.spread(self.records.slots[:, 0])[:, : grid.widths[0]]
                joined = torch.cat((sinks, dense[name][:, slots].transpose(0, 1).flatten(2, 3)), dim=2)
            whole.append(joined[:, :, :tokens].reshape(rows, self.wiring.geometry.kv_heads, tokens, -1))
        return whole[0], whole[1]

    def settle(self, hidden: tuple[Tensor, ...]) -> None:
        """Note what attention must not see, when windows of the layer have moved; :meth:`Stack.admit` shows more."""
        self.hidden, self.lent = hidden, None

    def view(self, landing: Landing) -> View:
        """What attention reads, lent without a copy."""
        lend = self.lent or self._lend()
        return lend(lengths=landing.lengths, rotary_offset=landing.rotary_offset)

    def _lend(self) -> "partial[View]":
        """All that stays until :meth:`settle`; noted for the next token, unless that would hold copies."""
        grid, sink_keys = self.records.grid(), self._attended_sinks()
        dense, slots = self.pools[0].lend(), grid.spread(self.records.slots)
        own = slots.select(2, 0).narrow(1, 0, grid.widths[0])
        lend = partial(
            View,
            sink_keys=sink_keys,
            sink_values=self.sink_values,
            keys=dense["keys"],
            values=dense["values"],
            slots=own if grid.present is None else own.clamp(min=0),
            regions=self.regions[0],
            hidden=self.hidden[0],
            encoded=self._encoded(grid, slots),
            windows=grid.spread(self.records.window),
            present=grid.present,
            rotary=self.wiring.rotary,
        )
        spread = any(self.shared.arrays) and self.lanes > 1
        copied = spread or grid.present is not None or sink_keys is not self.sink_keys
        self.lent = None if copied else lend
        return lend

    def _attended_sinks(self) -> Tensor:
        """Keys of the sinks where attention sees them.

        With positions relative to the cache, what was evicted between them and the rest leaves no gap: they turn by as
        many positions, and all differences to what follows are those of places in the cache (StreamingLLM).
        """
        rotary = self.wiring.rotary
        if self.wiring.policy.positions == "original" or self.whole or rotary is None:
            return self.sink_keys
        line = self.records.starts[:, 0] - self.records.first_line
        first = self.records.window[line.clamp(max=max(self.records.lines - 1, 0))]
        gap = torch.where(self.records.sizes[:, 0] > 0, first.long() * self.wiring.policy.window_tokens, 0)
        by = gap[:, None, None].expand(-1, -1, self.sink_keys.shape[2])
        turned = attrs.evolve(rotary, amplitude=1.0).rotate(self.sink_keys, by)
        return turned.to(self.sink_keys.dtype)

    def _encoded(self, grid: Grid, slots: Tensor) -> tuple[EncodedSegment, ...]:
        segments, column = [], grid.widths[0]
        for index, (keys, values) in enumerate(self.wiring.codecs, start=1):
            if width := grid.widths[index]:
                lent = {**self.pools[index].lend(), **self.shared.by_slot(index, self.regions[index])}
                own = slots.select(2, index).narrow(1, column, width)
                own = own if grid.present is None else own.clamp(min=0)
                codes = part(lent, "keys."), part(lent, "values.")
                segments.append(EncodedSegment(keys, values, *codes, own, self.regions[index], self.hidden[index]))
            column += width
        return tuple(segments)

    def query(
        self,
        vectors: Tensor,
        positions: Tensor,
        scaling: float,
        *,
        padded: bool,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> Query:
        """Queries ``[rows, q_heads, tokens, head_dim]`` at ``[lanes, tokens]`` true positions, by lane and KV head.

        Sink logits are ``[q_heads]``, the same for every row.
        """
        sinks = None if sink_logits is None else self._by_q_head(sink_logits.float().expand(vectors.shape[0], -1))
        return Query(self._by_q_head(vectors), positions, scaling, padded=padded, softcap=softcap, sink_logits=sinks)

    def _by_q_head(self, tensor: Tensor) -> Tensor:
        """``[rows, q_heads, ...]`` as ``[lanes, heads, group, ...]``."""
        group = self.wiring.geometry.q_heads // self.wiring.geometry.kv_heads
        return tensor.reshape(self.lanes, self.wiring.heads, group, *tensor.shape[2:])

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


def rank_in_lane(lanes: Tensor) -> Tensor:
    """How many of the same lane came before, for lanes that ascend."""
    return torch.arange(lanes.shape[0], device=lanes.device) - torch.searchsorted(lanes, lanes)


def with_slack(need: int) -> int:
    """A capacity that makes growth amortised: one sixteenth more than is needed."""
    return need + need // 16


def part(codes: Codes, prefix: str) -> Codes:
    """The arrays of keys, or of values, under their quantizer's own names."""
    return {name.removeprefix(prefix): array for name, array in codes.items() if name.startswith(prefix)}
