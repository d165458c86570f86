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
from qevict.engine.landing import Landing, land
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
        landing: where the tokens of that forward fall.
        pending: moves that wait for the end of the forward.
    """

    wiring: Wiring
    clock: Clock
    layers: list[Layer] = attrs.field(factory=list)
    arrival: Arrival | None = None
    landing: Landing | None = None
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
        arrival, landing = self._arrive(index, incoming)
        layer = self.layers[index]
        keys, values = layer.by_lane(incoming.keys), layer.by_lane(incoming.values)
        line = layer.append(keys, values, arrival, landing)
        grid = layer.records.grid()
        output, mass = self._attend(layer, grid, incoming, arrival, landing)
        self._score(layer, grid, arrival, _observe(layer, grid, landing, line, mass, keys, values))
        if arrival.event:
            self._route(index, layer, grid, arrival, landing)
        if index == self.wiring.geometry.layers - 1:
            self._finish(arrival, landing)
        return output

    def _arrive(self, index: int, incoming: Incoming) -> tuple[Arrival, Landing]:
        if index == 0:
            self.check_whole()
            rows = incoming.query.shape[0]
            self.arrival = self.clock.begin(incoming.valid, incoming.visible, incoming.position_ids, rows)
            assert self.clock.offset is not None
            self.landing = land(self.wiring, self.arrival, self.clock.offset)
        if len(self.layers) == index:
            self.layers.append(Layer.open(self.wiring, incoming.query.shape[0], incoming.keys.device))
        assert self.arrival is not None
        assert self.landing is not None
        return self.arrival, self.landing

    def _attend(
        self, layer: Layer, grid: Grid, incoming: Incoming, arrival: Arrival, landing: Landing
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the masses if the scorer needs them.

        The model's own attention reads the prompt, and later whatever still lies whole and in order: bit for bit what
        it would give without a policy.
        """
        policy = self.wiring.policy
        wanted = Need.MASS in policy.scorer.needs
        first, exact = arrival.start == 0, layer.sink_keys.dtype == incoming.keys.dtype
        view = layer.view(grid, landing)
        if first or (layer.whole and exact and not arrival.padded and (arrival.in_prompt or layer.in_order)):
            history = (incoming.keys, incoming.values) if first else layer.history(arrival.after[0])
            output = incoming.native(*history)
            return output, self._mass(layer, view, incoming, arrival, landing) if wanted else None
        partly = wanted and self._first_scored(arrival) > 0
        query = layer.query(incoming.query, landing.positions, incoming.scaling, padded=landing.padded)
        seen = policy.backend.attend(query, view, want_mass=wanted and not partly)
        rows = incoming.query.shape[0]
        output = seen.output.reshape(rows, -1, *seen.output.shape[3:]).transpose(1, 2).contiguous()
        return output, self._mass(layer, view, incoming, arrival, landing) if partly else seen.mass

    def _mass(self, layer: Layer, view: View, incoming: Incoming, arrival: Arrival, landing: Landing) -> Tensor:
        """A second pass over the queries that count."""
        since = self._first_scored(arrival)
        positions = landing.positions[:, since:]
        query = layer.query(incoming.query[:, :, since:], positions, incoming.scaling, padded=landing.padded)
        return self.wiring.policy.backend.mass(query, view)

    def _first_scored(self, arrival: Arrival) -> int:
        """First query of this forward whose masses count; the scorer may want the prompt's last queries only."""
        last = self.wiring.policy.scorer.prompt_queries
        if last is None or self.clock.prompted:
            return 0
        prompt = max(self.clock.prompt_tokens or 0, arrival.start + arrival.tokens)
        return min(max(0, prompt - last - arrival.start), arrival.tokens)

    def _score(self, layer: Layer, grid: Grid, arrival: Arrival, observation: Observation) -> None:
        """Score and record."""
        scorer, old = self.wiring.policy.scorer, layer.records.state
        if old or scorer.needs:
            state = scorer.update(layer.state(grid), observation)
            if arrival.event:  # the prompt is one; a look at every token would find nothing else
                check_state(scorer.name, state, old, grid.shape)
            layer.remember(grid, state)

    def _route(self, index: int, layer: Layer, grid: Grid, arrival: Arrival, landing: Landing) -> None:
        """Plan; apply at once if the plan's counts are known, else when the forward ends."""
        policy, windows = self.wiring.policy, layer.windows(grid, arrival)
        rankings = policy.scorer.rank(layer.state(grid), windows)
        check_rankings(policy.scorer.name, rankings, windows)
        budgets = self._lane_budgets(layer, index, arrival)
        costs = Costs(self.wiring.tier_bytes, self._kept(layer, grid, windows))
        capacities = [self._capacity(budget) for budget in budgets]
        plan = policy.router.plan(rankings, windows, costs, capacities)
        move = mover.prepare(layer, grid, plan, landing.rotary_offset)
        if plan.counts is None:
            self.pending.append(Pending(index, move))
        else:
            self._apply(index, move, mover.foresee(layer, plan.counts, windows.candidates), arrival, landing)

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

    def _apply(self, index: int, move: Move, tally: mover.Tally, arrival: Arrival, landing: Landing) -> None:
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
        layer.hide(landing.lengths)

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
        blocks = sum(sum(live) * block for live, block in zip(tally.live, self.wiring.slot_bytes, strict=True))
        blocks += new * self.wiring.slot_bytes[0]
        lines = sum(map(sum, tally.counts)) + new
        fixed = layer.lanes * (self.wiring.sink_bytes + self.wiring.lane_bytes)
        return blocks + lines * self.wiring.record_bytes + fixed

    def _finish(self, arrival: Arrival, landing: Landing) -> None:
        """Carry out what waits, with one question to the device for all layers; then move the clock."""
        trusted = arrival.tokens == 1 and self.clock.prompted
        if self.pending or (arrival.event and trusted):
            assert self.clock.faults is not None
            measured = [mover.measure(self.layers[item.index], item.move) for item in self.pending]
            astray, masked, *numbers = torch.cat((self.clock.faults.long(), *measured)).tolist()
            refuse(astray, masked)
            for item, counted in zip(self.pending, measured, strict=True):
                own, numbers = numbers[: len(counted)], numbers[len(counted) :]
                self._apply(item.index, item.move, mover.read(self.layers[item.index], own), arrival, landing)
            self.pending.clear()
        self.clock.finish(arrival)
        self.arrival = self.landing = None


def _observe(
    layer: Layer, grid: Grid, landing: Landing, line: Tensor, mass: Tensor | None, keys: Tensor, values: Tensor
) -> Observation:
    """What the scorer asked to be shown; new tokens always lie in the dense segment, whose columns come first."""
    needs, columns = layer.wiring.policy.scorer.needs, line - layer.records.starts[:, :1]
    return Observation(
        columns=columns if landing.of_windows is None else torch.where(line < 0, -1, columns),
        windows=grid.shape[1],
        mass=mass,
        keys=keys if Need.KEYS in needs else None,
        values=values if Need.VALUES in needs else None,
    )
