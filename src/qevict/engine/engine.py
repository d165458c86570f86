"""The engine: attend, score, record, plan, apply, for every layer of one cache."""

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import View
from qevict.contracts.values import Costs, Need, Observation, Windows
from qevict.engine import mover
from qevict.engine.checks import check_rankings, check_state
from qevict.engine.clock import Arrival, Clock, refuse
from qevict.engine.layer import Layer
from qevict.engine.looks import Look, look_at
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
        visible: ``[rows]`` how many keys, old and new, the mask lets the last query see; None without a mask.
        position_ids: rotary positions as the model received them.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    native: Native
    valid: Tensor | None
    visible: Tensor | None
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
        look: which queries of it the scorer is told of.
        pending: moves that wait for the end of the forward.
    """

    wiring: Wiring
    clock: Clock
    layers: list[Layer] = attrs.field(factory=list)
    arrival: Arrival | None = None
    look: Look | None = None
    pending: list[Pending] = attrs.field(factory=list)

    @classmethod
    def start(cls, wiring: Wiring) -> "Engine":
        """An engine that has seen nothing."""
        return cls(wiring, Clock(wiring.policy.period_tokens, wiring.policy.min_tokens))

    @property
    def nbytes(self) -> int:
        """Bytes of everything allocated."""
        return sum(layer.nbytes for layer in self.layers) + self.shared_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes that belong to no layer: what the clock keeps by row, and the rotary table."""
        rotary = self.wiring.rotary
        return self.clock.nbytes + (0 if rotary is None else rotary.inverse_frequencies.nbytes)

    def check_whole(self) -> None:
        """Refuse to speak of a cache whose layers disagree.

        Raises:
            InterruptedCacheError: a forward over it broke off half way.
        """
        if self.arrival is not None:
            msg = "a forward over this cache broke off half way, so its layers disagree; start again with a new cache"
            raise InterruptedCacheError(msg)

    def kept_positions(self, index: int) -> list[list[int]]:
        """True positions held in a layer, lane by lane; asks the device."""
        self.check_whole()
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
        self._score(layer, grid, arrival, self._observe(layer, grid, line, mass, keys, values))
        if arrival.event:
            self._route(index, layer, grid, arrival)
        if index == self.wiring.geometry.layers - 1:
            self._finish(arrival)
        return output

    def _arrive(self, index: int, incoming: Incoming) -> Arrival:
        if index == 0:
            self.check_whole()
            rows = incoming.query.shape[0]
            self.arrival = self.clock.begin(incoming.valid, incoming.visible, incoming.position_ids, rows)
            self.look = look_at(self.wiring.policy.scorer, self.clock, self.arrival)
        if len(self.layers) == index:
            self.layers.append(Layer.open(self.wiring, incoming.query.shape[0], incoming.keys.device))
        assert self.arrival is not None
        return self.arrival

    def _attend(self, layer: Layer, grid: Grid, incoming: Incoming, arrival: Arrival) -> tuple[Tensor, Tensor | None]:
        """The output, and the masses if the scorer needs them."""
        policy, look = self.wiring.policy, self.look
        assert self.clock.offset is not None
        assert look is not None
        wanted = Need.MASS in policy.scorer.needs and not look.nothing
        first, exact = arrival.start == 0, layer.sink_keys.dtype == incoming.keys.dtype
        view = layer.view(grid, arrival, self.clock.offset)
        if first or (layer.whole and exact and not arrival.padded):
            history = (incoming.keys, incoming.values) if first else layer.history(arrival.after[0])
            output = incoming.native(*history)
            return output, self._mass(layer, view, incoming, look) if wanted else None
        partly = wanted and not look.everything
        query = layer.query(incoming.query, arrival.positions, incoming.scaling)
        seen = policy.backend.attend(query, view, want_mass=wanted and not partly)
        rows = incoming.query.shape[0]
        output = seen.output.reshape(rows, -1, *seen.output.shape[3:]).transpose(1, 2).contiguous()
        return output, self._mass(layer, view, incoming, look) if partly else seen.mass

    def _mass(self, layer: Layer, view: View, incoming: Incoming, look: Look) -> Tensor:
        """A second pass over the queries that count."""
        query = layer.query(incoming.query[:, :, look.slots], look.positions, incoming.scaling)
        return self.wiring.policy.backend.mass(query, view)

    def _observe(
        self, layer: Layer, grid: Grid, line: Tensor, mass: Tensor | None, keys: Tensor, values: Tensor
    ) -> Observation:
        """What the scorer asked to be shown; new tokens always lie in the dense segment, whose columns come first."""
        assert self.look is not None
        needs = self.wiring.policy.scorer.needs
        return Observation(
            columns=torch.where(line < 0, -1, line - layer.records.starts[:, :1]),
            windows=grid.present.shape[1],
            mass=mass,
            stands_for=self.look.stands_for,
            keys=keys if Need.KEYS in needs else None,
            values=values if Need.VALUES in needs else None,
        )

    def _score(self, layer: Layer, grid: Grid, arrival: Arrival, observation: Observation) -> None:
        """Score and record; a scorer that looks at masses alone is not called where it wanted no look."""
        scorer, old = self.wiring.policy.scorer, layer.records.state
        if observation.mass is None and scorer.needs == {Need.MASS}:
            return
        if old or scorer.needs:
            state = scorer.update(layer.state(grid), observation)
            if arrival.event:  # the prompt is one; a look at every token would find nothing else
                check_state(scorer.name, state, old, tuple(grid.present.shape))
            layer.remember(grid, state)

    def _route(self, index: int, layer: Layer, grid: Grid, arrival: Arrival) -> None:
        """Plan; apply at once if the plan's counts are known, else when the forward ends."""
        assert self.clock.offset is not None
        policy, windows = self.wiring.policy, layer.windows(grid, arrival)
        rankings = policy.scorer.rank(layer.state(grid), windows)
        check_rankings(policy.scorer.name, rankings, windows)
        budgets = self._lane_budgets(layer, index, arrival)
        costs = Costs(self.wiring.tier_bytes, self._kept(layer, grid, windows))
        capacities = [self._capacity(budget) for budget in budgets]
        plan = policy.router.plan(rankings, windows, costs, capacities)
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
        reserve = self.wiring.reserve_bytes
        if self.wiring.policy.strict and budget is not None and budget < reserve:
            msg = (
                f"the protected tokens of a lane take {reserve} bytes, its budget is {budget}; raise the budget, "
                f"protect fewer sinks or recent tokens, or use strict=False"
            )
            raise BudgetExceededError(msg)
        return self.wiring.capacity(budget)

    def _apply(self, index: int, move: Move, tally: mover.Tally, arrival: Arrival) -> None:
        layer = self.layers[index]
        room = [
            max(opened, self.wiring.windows_until(tokens + left))
            for opened, tokens, left in zip(
                layer.records.opened, layer.lane_counts(arrival.after), layer.lane_counts(arrival.left), strict=True
            )
        ]
        allowed = self._allowed_bytes(layer, index, arrival)
        spare = None if allowed is None else allowed - self._needed_bytes(layer, tally, room)
        mover.apply(layer, move, tally, room, spare)
        mover.shrink(layer, allowed)

    def _allowed_bytes(self, layer: Layer, index: int, arrival: Arrival) -> int | None:
        """Bytes that this layer may have allocated; None where nothing limits it."""
        budgets = self._lane_budgets(layer, index, arrival)
        if self.wiring.policy.accounting == "paper" or all(budget is None for budget in budgets):
            return None
        least = self.wiring.reserve_bytes
        whole = [self.wiring.whole_lane_bytes(tokens) for tokens in layer.lane_counts(arrival.after)]
        return sum(own if budget is None else max(budget, least) for budget, own in zip(budgets, whole, strict=True))

    def _needed_bytes(self, layer: Layer, tally: mover.Tally, room: Sequence[int]) -> int:
        new = sum(room) - sum(layer.records.opened)
        live = (tally.live[0] + new, *tally.live[1:])
        blocks = sum(count * block for count, block in zip(live, self.wiring.block_bytes, strict=True))
        lines = sum(map(sum, tally.counts)) + new
        fixed = layer.lanes * (self.wiring.sink_bytes + self.wiring.lane_bytes)
        return blocks + lines * self.wiring.record_bytes + fixed

    def _finish(self, arrival: Arrival) -> None:
        """Carry out what waits, with one question to the device for all layers; then move the clock."""
        trusted = arrival.tokens == 1 and self.clock.prompted
        if self.pending or (arrival.event and trusted):
            assert self.clock.faults is not None
            measured = [mover.measure(self.layers[item.index], item.move) for item in self.pending]
            astray, masked, *numbers = torch.cat((self.clock.faults.long(), *measured)).tolist()
            refuse(astray, masked)
            for item, counted in zip(self.pending, measured, strict=True):
                own, numbers = numbers[: len(counted)], numbers[len(counted) :]
                self._apply(item.index, item.move, mover.read(self.layers[item.index], own), arrival)
            self.pending.clear()
        self.clock.finish(arrival)
        self.arrival = self.look = None
