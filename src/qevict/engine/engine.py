"""The engine: attend, score, record, plan, apply, for every layer of one cache."""

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from qevict.contracts.values import Costs, Need, Observation, Windows
from qevict.engine import mover
from qevict.engine.clock import Arrival, Clock, refuse_drift
from qevict.engine.layer import Layer
from qevict.engine.mover import Move
from qevict.engine.records import Grid
from qevict.engine.wiring import Wiring
from qevict.errors import BudgetExceededError, InterruptedCacheError

Native = Callable[[Tensor, Tensor], Tensor]
"""The model's own attention over ``[rows, kv_heads, tokens, head_dim]`` keys and values, masks and all."""


@attrs.frozen(eq=False)
class Incoming:
    """What one layer's attention is given in one forward.

    Attributes:
        query: ``[rows, q_heads, tokens, head_dim]``, rotated.
        keys: ``[rows, kv_heads, tokens, head_dim]``, rotated.
        values: likewise.
        scaling: factor on the dot products.
        native: the model's own attention.
        valid: ``[rows, tokens]``, False for pads; None if there are none.
        position_ids: rotary positions as the model received them.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    native: Native
    valid: Tensor | None
    position_ids: Tensor


@attrs.frozen(eq=False)
class Pending:
    """A planned move that waits for the end of the forward, so that all layers ask the device at once."""

    index: int
    move: Move


@attrs.define(eq=False)
class Engine:
    """All state of one cache.

    Attributes:
        wiring: sizes and prices.
        clock: how far each row is.
        layers: opened at the first forward.
        arrival: the forward under way; left standing by an exception.
        pending: moves that wait for the end of the forward.
    """

    wiring: Wiring
    clock: Clock
    layers: list[Layer] = attrs.field(factory=list)
    arrival: Arrival | None = None
    pending: list[Pending] = attrs.field(factory=list)

    @classmethod
    def start(cls, wiring: Wiring) -> "Engine":
        """An engine that has seen nothing."""
        return cls(wiring, Clock(wiring.policy.period_tokens))

    @property
    def nbytes(self) -> int:
        """Bytes of everything allocated: layers, rotary offsets, the drift flag, the rotary table."""
        clock, rotary = self.clock, self.wiring.rotary
        shared = [tensor.nbytes for tensor in (clock.offset, clock.drift) if tensor is not None]
        table = 0 if rotary is None else rotary.inverse_frequencies.nbytes
        return sum(layer.nbytes for layer in self.layers) + sum(shared) + table

    def kept_positions(self, index: int) -> list[list[int]]:
        """True positions held in a layer, lane by lane; asks the device."""
        return self.layers[index].kept_positions(self.clock.tokens)

    def step(self, index: int, incoming: Incoming) -> Tensor:
        """One layer's part of a forward.

        Args:
            index: which of the owned layers; they come in order.
            incoming: queries, keys, values and what belongs to them.

        Returns:
            ``[rows, tokens, q_heads, head_dim]``.
        """
        arrival = self._arrive(index, incoming)
        layer = self.layers[index]
        keys, values = layer.by_lane(incoming.keys), layer.by_lane(incoming.values)
        line = layer.append(keys, values, arrival)
        grid = layer.records.grid()
        output, mass = self._attend(layer, grid, incoming, arrival)
        self._score(layer, grid, arrival, _observe(self.wiring, layer, grid, line, mass, keys, values))
        if arrival.event:
            self._route(index, layer, grid, arrival)
        if index == self.wiring.geometry.layers - 1:
            self._finish(arrival)
        return output

    def _arrive(self, index: int, incoming: Incoming) -> Arrival:
        if index == 0:
            if self.arrival is not None:
                msg = (
                    "a forward over this cache broke off half way, so its layers disagree; start again with a new cache"
                )
                raise InterruptedCacheError(msg)
            rows = incoming.query.shape[0]
            self.arrival = self.clock.begin(incoming.valid, incoming.position_ids, rows)
        if len(self.layers) == index:
            self.layers.append(Layer.open(self.wiring, incoming.query.shape[0], incoming.keys.device))
        assert self.arrival is not None
        return self.arrival

    def _attend(self, layer: Layer, grid: Grid, incoming: Incoming, arrival: Arrival) -> tuple[Tensor, Tensor | None]:
        """The output, and the masses if the scorer needs them."""
        policy = self.wiring.policy
        assert self.clock.offset is not None
        wanted = Need.MASS in policy.scorer.needs
        first, exact = arrival.start == 0, layer.sink_keys.dtype == incoming.keys.dtype
        if first or (layer.whole and exact and not arrival.padded):
            history = (incoming.keys, incoming.values) if first else layer.history(arrival.after[0])
            output = incoming.native(*history)
            if not wanted:
                return output, None
            since = self._first_scored(arrival)
            query = layer.query(incoming.query[:, :, since:], arrival.positions[:, since:], incoming.scaling)
            return output, policy.backend.mass(query, layer.view(grid, arrival, self.clock.offset))
        query = layer.query(incoming.query, arrival.positions, incoming.scaling)
        seen = policy.backend.attend(query, layer.view(grid, arrival, self.clock.offset), want_mass=wanted)
        rows = incoming.query.shape[0]
        return seen.output.reshape(rows, -1, *seen.output.shape[3:]).transpose(1, 2).contiguous(), seen.mass

    def _first_scored(self, arrival: Arrival) -> int:
        """First query of this forward whose masses count; the scorer may want the prompt's last queries only."""
        last = self.wiring.policy.scorer.prompt_queries
        if last is None or self.clock.prompted:
            return 0
        prompt = max(self.clock.prompt_tokens or 0, arrival.start + arrival.tokens)
        return min(max(0, prompt - last - arrival.start), arrival.tokens)

    def _score(self, layer: Layer, grid: Grid, arrival: Arrival, observation: Observation) -> None:
        """Score and record."""
        if layer.records.state or self.wiring.policy.scorer.needs:
            layer.remember(grid, self.wiring.policy.scorer.update(layer.state(grid), observation))

    def _route(self, index: int, layer: Layer, grid: Grid, arrival: Arrival) -> None:
        """Plan; apply at once if the plan's counts are known, else when the forward ends."""
        assert self.clock.offset is not None
        windows = layer.windows(grid, arrival)
        rankings = self.wiring.policy.scorer.rank(layer.state(grid), windows)
        budgets = self._lane_budgets(layer, index, arrival)
        costs = Costs(self.wiring.tier_bytes, self._kept(layer, grid, windows))
        capacities = [self._capacity(budget) for budget in budgets]
        plan = self.wiring.policy.router.plan(rankings, windows, costs, capacities)
        move = mover.prepare(layer, grid, plan, self.clock.offset)
        if plan.counts is None:
            self.pending.append(Pending(index, move))
        else:
            self._apply(index, move, mover.foresee(layer, plan.counts, windows.candidates), arrival)

    def _kept(self, layer: Layer, grid: Grid, windows: Windows) -> Tensor | None:
        """Codes that windows would keep in a hotter tier; None while there are none."""
        if not layer.coded:
            return None
        tiers = len(self.wiring.policy.tiers)
        held = mover.tier_codes(layer, grid.spread(layer.records.slots) >= 0) & windows.candidate[..., None]
        return self.wiring.policy.ledger.retain(held, torch.zeros_like(windows.place), tiers)

    def _lane_budgets(self, layer: Layer, index: int, arrival: Arrival) -> list[int | None]:
        return layer.lane_counts([self.wiring.lane_budgets(tokens)[index] for tokens in arrival.after])

    def _capacity(self, budget: int | None) -> int | None:
        if budget is None:
            return None
        reserve = self.wiring.reserve_bytes
        if self.wiring.policy.strict and budget < reserve:
            msg = (
                f"the protected tokens of a lane take {reserve} bytes, its budget is {budget}; raise the budget, "
                f"protect fewer sinks or recent tokens, or use strict=False"
            )
            raise BudgetExceededError(msg)
        return max(0, budget - reserve)

    def _apply(self, index: int, move: Move, tally: mover.Tally, arrival: Arrival) -> None:
        layer = self.layers[index]
        room = [
            max(opened, layer.windows_until(tokens + self.clock.period_tokens))
            for opened, tokens in zip(layer.records.opened, layer.lane_counts(arrival.after), strict=True)
        ]
        allowed = self._allowed_bytes(layer, index, arrival)
        spare = None if allowed is None else allowed - self._needed_bytes(layer, tally, room)
        mover.apply(layer, move, tally, room, spare)
        mover.shrink(layer, allowed)

    def _allowed_bytes(self, layer: Layer, index: int, arrival: Arrival) -> int | None:
        """Bytes that this layer may have allocated; None where nothing limits it."""
        budgets = self._lane_budgets(layer, index, arrival)
        if self.wiring.policy.accounting == "paper" or any(budget is None for budget in budgets):
            return None
        return sum(max(budget or 0, self.wiring.reserve_bytes) for budget in budgets)

    def _needed_bytes(self, layer: Layer, tally: mover.Tally, room: Sequence[int]) -> int:
        new = sum(room) - sum(layer.records.opened)
        live = (tally.live[0] + new, *tally.live[1:])
        blocks = sum(count * block for count, block in zip(live, self.wiring.block_bytes, strict=True))
        lines = sum(map(sum, tally.counts)) + new
        fixed = layer.lanes * (self.wiring.sink_bytes + self.wiring.lane_bytes)
        return blocks + lines * self.wiring.record_bytes + fixed

    def _finish(self, arrival: Arrival) -> None:
        """Carry out what waits, with one question to the device for all layers; then move the clock."""
        if arrival.event and self.clock.drift is not None:
            measured = [mover.measure(self.layers[item.index], item.move) for item in self.pending]
            astray, *numbers = torch.cat((self.clock.drift.long(), *measured)).tolist()
            refuse_drift(bool(astray))
            for item, counted in zip(self.pending, measured, strict=True):
                own, numbers = numbers[: len(counted)], numbers[len(counted) :]
                self._apply(item.index, item.move, mover.read(self.layers[item.index], own), arrival)
            self.pending.clear()
        self.clock.finish(arrival)
        self.arrival = None


def _observe(
    wiring: Wiring, layer: Layer, grid: Grid, line: Tensor, mass: Tensor | None, keys: Tensor, values: Tensor
) -> Observation:
    """What the scorer asked to be shown; new tokens always lie in the dense segment, whose columns come first."""
    needs = wiring.policy.scorer.needs
    return Observation(
        columns=torch.where(line < 0, -1, line - layer.records.starts[:, :1]),
        windows=grid.present.shape[1],
        mass=mass,
        keys=keys if Need.KEYS in needs else None,
        values=values if Need.VALUES in needs else None,
    )
