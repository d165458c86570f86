"""Layers as one: what a single token or an event works out, it works out once for all of them."""

import itertools
import operator
from collections.abc import Sequence
from functools import cached_property

import attrs
import torch
from torch import Tensor

from qevict.contracts.scorer import State
from qevict.contracts.values import PROTECTED, Windows
from qevict.engine import records as table
from qevict.engine.clock import Arrival
from qevict.engine.landing import Landing
from qevict.engine.layer import Layer, rank_in_lane, with_slack
from qevict.engine.records import Counts, Grid, Records
from qevict.engine.wiring import Wiring
from qevict.transfer import to_device


@attrs.define(eq=False, slots=False)
class Stack:
    """Some layers as one: their lanes one after another, over one table of records.

    The prompt's event takes each layer alone, so that no layer waits for the others with its prompt uncompressed. Later
    tokens and events, which are small, take all layers at once. Its layers' own tables are views of the stack's, and so
    is what is hidden of their dense pools.

    Attributes:
        layers: which layers, with equally many lanes each.
        records: the table of all of them.
        hidden: what attention must not see of all dense pools, one after another; None before :meth:`hide`.
    """

    layers: tuple[Layer, ...]
    records: Records
    hidden: Tensor | None = None

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> "Stack":
        """Stack layers up."""
        stack = cls(tuple(layers), table.joined([layer.records for layer in layers]))
        stack.put_back(stack.records)
        return stack

    @property
    def wiring(self) -> Wiring:
        """Sizes and prices, the same for all."""
        return self.layers[0].wiring

    @cached_property
    def lanes_per_layer(self) -> int:
        """Lanes of one layer."""
        return self.layers[0].lanes

    @property
    def regions(self) -> Counts:
        """Slots by segment and lane."""
        return _side_by_side([layer.regions for layer in self.layers])

    @property
    def live(self) -> Counts:
        """Slots in use by segment and lane."""
        return _side_by_side([layer.live for layer in self.layers])

    @property
    def coded(self) -> bool:
        """Some window may own codes beside its place."""
        return any(layer.coded for layer in self.layers)

    @cached_property
    def lane_of(self) -> Tensor:
        """Lane of each line."""
        return self.records.lane_of()

    def by_lane(self, tensor: Tensor) -> Tensor:
        """``[rows, kv_heads, ...]`` of one layer as ``[lanes, heads, ...]``."""
        return self.layers[0].by_lane(tensor)

    @cached_property
    def even(self) -> bool:
        """No layer's own rectangle has filler, so that its columns are its lines."""
        return all(layer.records.even for layer in self.layers)

    def grid(self) -> Grid:
        """The rectangle in which all layers are scored."""
        return self.records.in_lines() if self.even else self.records.grid()

    def put_back(self, records: Records) -> None:
        """Give every layer its part of a new table."""
        self.records = records
        self.__dict__.pop("lane_of", None)
        self.__dict__.pop("even", None)
        for layer, own in zip(self.layers, table.parted(records, len(self.layers)), strict=True):
            layer.records = own

    def of_layer(self, lanes: Sequence[int], index: int) -> tuple[int, ...]:
        """The part of a layer in numbers by lane."""
        return tuple(lanes[index * self.lanes_per_layer : (index + 1) * self.lanes_per_layer])

    def for_every_layer(self, lanes: Tensor) -> Tensor:
        """``[lanes, ...]`` of one layer, for the lanes of all."""
        return lanes.repeat(len(self.layers), *(1,) * (lanes.ndim - 1)) if len(self.layers) > 1 else lanes

    def set_live(self, live: Counts) -> None:
        """Note the slots in use."""
        for index, layer in enumerate(self.layers):
            layer.live = tuple(self.of_layer(lanes, index) for lanes in live)

    def bases(self, segment: int) -> list[int]:
        """Slots of the pools of earlier layers, by layer, and of all."""
        return [*itertools.accumulate((sum(layer.regions[segment]) for layer in self.layers), initial=0)]

    def _flat_slots(self, segment: int) -> tuple[Tensor, Tensor]:
        """Slot of each line, counted through the pools of all layers; and each lane's first. The last one is spare."""
        bases, device = self.bases(segment), self.records.slots.device
        slots, own = self.records.slots[:, segment].long(), self.lanes_per_layer
        base = to_device([first for first in bases[:-1] for _ in range(own)], device)
        return torch.where(slots < 0, bases[-1], slots + base[self.lane_of]), base

    def free_slots(self, segment: int, lanes: Tensor) -> Tensor:
        """A slot that no line owns for each of some windows, in the region of its lane; ``lanes`` ascend."""
        flat, base = self._flat_slots(segment)
        total = self.bases(segment)[-1]
        free = torch.ones(total + 1, dtype=torch.bool, device=flat.device)
        free[flat] = False
        found = torch.nonzero_static(free[:total], size=total)[:, 0]
        before = free.cumsum(0) - free.long()
        regions = itertools.accumulate(itertools.chain(*(layer.regions[segment] for layer in self.layers)), initial=0)
        starts = to_device([*regions][:-1], flat.device)
        return found[before[starts][lanes] + rank_in_lane(lanes)] - base[lanes]

    def open_windows(self, until: Sequence[int]) -> None:
        """Make room for protected windows up to ``until`` in every lane; grows the dense pools if it must."""
        opened = self.records.opened
        goals = tuple(map(max, until, opened))
        new = tuple(map(operator.sub, goals, opened))
        if not any(new):
            return
        live = self.live
        need = tuple(map(operator.add, live[0], new))
        for index, layer in enumerate(self.layers):
            own = self.of_layer(need, index)
            if any(map(operator.gt, own, layer.regions[0])):
                layer.repack(0, [with_slack(count) for count in own])
        device, total = self.records.window.device, sum(new)
        lanes = torch.arange(len(new), device=device).repeat_interleave(to_device(new, device), output_size=total)
        state = self.wiring.policy.scorer.start(1, total, device)
        self.put_back(table.opened_until(self.records, goals, self.free_slots(0, lanes), state))
        self.set_live((need, *live[1:]))

    def hide(self, lengths: Tensor) -> None:
        """Note what attention must not see, after windows were opened or moved.

        Codes that a window keeps while it lives in a hotter tier are a copy, and no second window.

        Args:
            lengths: true tokens that each lane of every layer has written.
        """
        parts, home = [], self.wiring.segment_of(self.records.place.long())
        for segment in range(self.wiring.segments):
            bases = self.bases(segment)
            flat = torch.where(home == segment, self._flat_slots(segment)[0], bases[-1])
            shape = (bases[-1] + 1, self.wiring.policy.window_tokens)[: 2 - min(segment, 1)]
            hidden = torch.ones(shape, dtype=torch.bool, device=lengths.device)
            hidden[flat] = False if segment else self._unwritten(lengths)
            own = hidden[:-1].clone()
            self.hidden = own if segment == 0 else self.hidden
            parts.append(own.split([last - first for first, last in itertools.pairwise(bases)]))
        for layer, masks in zip(self.layers, zip(*parts, strict=True), strict=True):
            layer.settle(masks)
        self.__dict__.pop("lane_of", None)  # what stays until the next event is billed, and this is not

    def admit(self, landing: Landing) -> tuple[Tensor, ...]:
        """Let attention see the tokens of a forward, which every layer is about to write.

        Returns:
            by layer, the place of each token that falls into a window, counted in tokens through its dense pool.
        """
        assert self.hidden is not None
        layers, window = len(self.layers), self.wiring.policy.window_tokens
        lines = self.records.lines_of(self.for_every_layer(landing.window)).unflatten(0, (layers, -1))
        slots = self.records.slots.select(1, 0)[landing.entries(lines)]
        places = torch.add(landing.step, slots, alpha=window)
        first = to_device([base * window for base in self.bases(0)[:-1]], places.device)
        self.hidden.view(-1).index_fill_(0, (places + first.unsqueeze(1)).view(-1), value=False)
        return places.unbind()

    def columns(self, landing: Landing) -> Tensor:
        """``[lanes, tokens]`` column of the window that each token of a forward falls into; -1 for sinks and pads."""
        return self.records.columns_of(self.for_every_layer(landing.window))

    def _unwritten(self, lengths: Tensor) -> Tensor:
        """``[lines, window]`` tokens of windows that are yet to come."""
        policy = self.wiring.policy
        first = self.records.window.long() * policy.window_tokens + policy.sink_tokens
        steps = torch.arange(policy.window_tokens, device=first.device)
        return first[:, None] + steps >= lengths[self.lane_of][:, None]

    def windows(self, grid: Grid, arrival: Arrival) -> Windows:
        """What a router may place at this event."""
        layer, layers, records = self.layers[0], len(self.layers), self.records
        due = layer.lane_counts([self._routed(arrival, now) for now in arrival.due]) * layers
        aged = [
            self.wiring.aged_until(tokens) if now else 0
            for tokens, now in zip(layer.lane_counts(arrival.after) * layers, due, strict=True)
        ]
        window, place = grid.spread(records.window), grid.spread(records.place)
        limit = to_device(aged, window.device)
        present = torch.ones_like(window, dtype=torch.bool) if grid.present is None else grid.present
        live = [sum(lane) for lane in zip(*records.counts, strict=True)]
        unranked = map(operator.sub, records.opened, aged)
        candidates = tuple(total - rest if now else 0 for total, rest, now in zip(live, unranked, due, strict=True))
        policy = self.wiring.policy
        return Windows(
            positions=window.long() * policy.window_tokens + policy.sink_tokens,
            present=present,
            candidate=present & (window < limit[:, None]),
            place=torch.where(present, place, PROTECTED).long(),
            candidates=candidates,
            lengths=self.for_every_layer(layer.lane_tensor(arrival.lengths)),
            layers=layers,
            lanes_per_row=self.wiring.lanes_per_row,
        )

    def _routed(self, arrival: Arrival, due: bool) -> bool:  # noqa: FBT001 - an entry of an arrival
        """A row's event ranks its windows, unless its policy compresses once and has done so."""
        return due and (arrival.in_prompt or self.wiring.policy.route_at == "period")

    def state(self, grid: Grid) -> State:
        """The scorer's state of all lanes."""
        return table.state_of(self.records, grid, self.wiring.policy.scorer)

    def remember(self, grid: Grid, state: State) -> None:
        """Write the scorer's state back."""
        table.remember(self.records, grid, state)


def _side_by_side(by_layer: Sequence[Counts]) -> Counts:
    return tuple(tuple(itertools.chain(*lanes)) for lanes in zip(*by_layer, strict=True))
