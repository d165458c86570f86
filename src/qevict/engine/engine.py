"""The engine: attend, score, record, plan, apply, for every layer of one cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import View
from qevict.contracts.values import Need
from qevict.engine import event, tally
from qevict.engine.checks import check_state
from qevict.engine.clock import Arrival, Clock, refuse
from qevict.engine.event import Event
from qevict.engine.forward import Forward, Incoming, Seen, check_sizes
from qevict.engine.landing import Landing, land
from qevict.engine.layer import Layer
from qevict.engine.looks import look_at
from qevict.engine.observing import asked, observe, shown_alone
from qevict.engine.stack import Stack
from qevict.engine.tally import Tally
from qevict.engine.wiring import Wiring
from qevict.errors import InterruptedCacheError, UnsupportedOperationError


@attrs.define(eq=False)
class Engine:
    """All state of one cache.

    Attributes:
        wiring: sizes and prices.
        clock: how far each row is.
        layers: opened at the first forward.
        stack: all layers as one, from the first single token behind the prompt until a layer is laid out by itself.
        forward: the forward under way; left standing by an exception.
        waiting: layers that are to be routed when the forward ends.
        torn: every layer is being changed, one after another; left standing by an exception.
    """

    wiring: Wiring
    clock: Clock
    layers: list[Layer] = attrs.field(factory=list)
    stack: Stack | None = None
    forward: Forward | None = None
    waiting: list[int] = attrs.field(factory=list)
    torn: bool = False

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

    @property
    def whole(self) -> bool:
        """Every token is still held as the model gave it, or rounded once to the stored dtype."""
        return all(layer.whole for layer in self.layers)

    def check_whole(self) -> None:
        """Refuse to speak of a cache whose layers disagree.

        Raises:
            InterruptedCacheError: a forward over it, or another change of all layers, broke off half way.
        """
        if self.forward is not None or self.torn:
            what = "a change of" if self.torn else "a forward over"
            msg = f"{what} this cache broke off half way, so its layers disagree; reset it, or start with a new cache"
            raise InterruptedCacheError(msg)

    @contextmanager
    def change(self) -> Iterator[None]:
        """Every layer is changed inside; should that break off half way, the cache is not whole any more.

        Raises:
            InterruptedCacheError: it is not whole now.
        """
        self.check_whole()
        self.torn, self.stack = True, None
        yield
        self.torn = False

    def reset(self) -> None:
        """Forget everything, also after a forward that broke off."""
        fresh = Engine.start(self.wiring)
        self.clock, self.layers = fresh.clock, fresh.layers
        self.stack, self.forward, self.waiting, self.torn = None, None, [], False

    def kept_positions(self, index: int) -> list[list[int]]:
        """True positions held in a layer, lane by lane; asks the device."""
        self.check_whole()
        return self.layers[index].kept_positions(self.clock.tokens)

    def step(self, index: int, incoming: Incoming) -> Tensor:
        """One layer's part of a forward.

        Args:
            index: which of the layers that the policy rules; they come in order.
            incoming: queries, keys, values and what belongs to them.

        Returns:
            ``[rows, tokens, q_heads, head_dim]``.
        """
        forward = self._arrive(index, incoming)
        layer, arrival = self.layers[index], forward.arrival
        places = self._make_room(layer, forward) if forward.places is None else forward.places[index]
        layer.append(layer.by_lane(incoming.keys), layer.by_lane(incoming.values), forward.landing, places)
        output, mass = self._attend(layer, incoming, forward)
        if self._scores(layer, arrival):
            self._see(layer, forward, Seen(incoming, mass))
        if arrival.event:
            self._route(index, forward)
        if index == self.wiring.geometry.layers - 1:
            self._finish(forward)
        return output

    def _make_room(self, layer: Layer, forward: Forward) -> Tensor:
        """Open windows for a forward's tokens; a routing event leaves room for the single ones until the next."""
        stack = Stack.of([layer])
        stack.open_windows(layer.lane_counts([self.wiring.windows_until(tokens) for tokens in forward.arrival.after]))
        stack.hide(forward.landing.before)
        return stack.admit(forward.landing)[0]

    def _scores(self, layer: Layer, arrival: Arrival) -> bool:
        """There is something to learn, and windows are still to be ranked by it."""
        policy = self.wiring.policy
        ranked = arrival.in_prompt or policy.route_at == "period"
        return ranked and bool(policy.scorer.needs or layer.records.state)

    def _arrive(self, index: int, incoming: Incoming) -> Forward:
        if index == 0:
            self.check_whole()
            self.check_repeated()
            rows = incoming.query.shape[0]
            arrival = self.clock.begin(incoming.valid, incoming.visible, incoming.position_ids, rows)
            assert self.clock.offset is not None
            landing, look = land(self.wiring, arrival, self.clock.offset), look_at(self.wiring, self.clock, arrival)
            self.forward = Forward(arrival, landing, look)
            single = arrival.tokens == 1 and not arrival.in_prompt
            self.stack = self._together(landing) if single else None
            if self.stack is not None:
                self.forward = attrs.evolve(self.forward, places=self.stack.admit(landing))
        if len(self.layers) == index:
            check_sizes(self.wiring.geometry, incoming)
            self.layers.append(Layer.open(self.wiring, index, incoming.query.shape[0], incoming.keys.device))
        assert self.forward is not None
        return self.forward

    def _together(self, landing: Landing) -> Stack:
        """All layers as one, before the tokens of a forward come."""
        if self.stack is not None:
            return self.stack
        stack = Stack.of(self.layers)
        stack.hide(stack.for_every_layer(landing.before))
        return stack

    def check_repeated(self) -> None:
        """A prompt that is to be repeated is held until then.

        Raises:
            UnsupportedOperationError: it is not held.
        """
        scorer = self.wiring.policy.scorer
        if Need.RECONSTRUCTION in scorer.needs and not (self.clock.prompted or self.clock.held):
            msg = (
                f"scorer {scorer.name!r} lets the model repeat the prompt before it is compressed, which a plain "
                f"forward cannot do; read the context by cache = session.prefill(context_ids), then go on with "
                f"session.generate(new_ids, cache=cache)"
            )
            raise UnsupportedOperationError(msg)

    def _attend(self, layer: Layer, incoming: Incoming, forward: Forward) -> tuple[Tensor, Tensor | None]:
        """The output, and the masses if the scorer needs them.

        The model's own attention reads the prompt, and later what is still whole, if that lies in order or is short:
        bit for bit what it would give without a policy.
        """
        arrival, landing, look = forward.arrival, forward.landing, forward.look
        wanted = Need.MASS in self.wiring.policy.scorer.needs and not look.nothing
        first, exact = arrival.start == 0, layer.sink_keys.dtype == incoming.keys.dtype
        view = layer.view(landing)
        if not first and not any(arrival.after):  # nothing but pads so far: there is nothing to read, and no reader
            output = torch.zeros_like(incoming.query.transpose(1, 2), memory_format=torch.contiguous_format)
            return output, self._mass(layer, view, incoming, forward) if wanted else None
        if first or (layer.whole and exact and not arrival.padded and self._readable(layer, arrival)):
            history = (incoming.keys, incoming.values) if first else layer.history(arrival.after[0])
            output = incoming.native(*history)
            return output, self._mass(layer, view, incoming, forward) if wanted else None
        query = asked(layer, incoming, incoming.query, landing.positions, padded=landing.padded)
        told = wanted and look.everything
        seen = self.wiring.backend.attend(query, view, want_mass=told)
        rows, _, tokens, head_dim = incoming.query.shape
        output = seen.output.reshape(rows, -1, tokens, head_dim).transpose(1, 2).contiguous()
        return output, self._mass(layer, view, incoming, forward) if wanted and not told else seen.mass

    def _readable(self, layer: Layer, arrival: Arrival) -> bool:
        """What a layer holds lies in order, or is short."""
        return arrival.in_prompt or layer.in_order or max(arrival.after) <= self.wiring.unranked_tokens

    def _mass(self, layer: Layer, view: View, incoming: Incoming, forward: Forward) -> Tensor:
        """A second pass over the queries that count."""
        look = forward.look
        query = asked(layer, incoming, incoming.query[:, :, look.slots], look.positions, padded=True)
        if layer.whole:
            query = attrs.evolve(query, known=look.known)
        return self.wiring.backend.mass(query, view)

    def _see(self, layer: Layer, forward: Forward, seen: Seen) -> None:
        """Score a layer now, or all of them when the forward ends."""
        if shown_alone(self.wiring.policy.scorer.needs, forward):
            self._score(Stack.of([layer]), forward, [seen])
        else:
            forward.seen.append(seen)

    def _score(self, stack: Stack, forward: Forward, seen: Sequence[Seen]) -> None:
        """Score and record; a scorer is not called where nothing that it needs is to be seen."""
        scorer, grid = self.wiring.policy.scorer, stack.grid()
        observation = observe(stack, grid, forward, seen)
        if scorer.needs and not observation.shows_something:
            return
        state = scorer.update(stack.state(grid), observation)
        check_state(scorer.name, state, stack.records.state, grid.shape)
        stack.remember(grid, state)

    def _route(self, index: int, forward: Forward) -> None:
        """End a layer's prompt at once, so that it does not wait uncompressed for the others.

        The device is asked if the router does not know how much it moves: once for each layer, for each prompt. Other
        events wait for the end of the forward, when all layers are routed together, as do layers that share bytes.
        """
        if forward.arrival.in_prompt and self.wiring.policy.router.scope != "model":
            self.route_together([index], forward.arrival, forward.landing, ask=False)
        else:
            self.waiting.append(index)

    def end_prompt(self) -> None:
        """End a prompt that was held, with the event that falls at its end."""
        arrival = self.clock.still((True,) * len(self.clock.tokens), ends_prompt=True)
        assert self.clock.offset is not None
        landing = land(self.wiring, arrival, self.clock.offset)
        with self.change():
            layers = len(self.layers)
            at_once = layers if self.wiring.policy.router.scope == "model" else 1
            for first in range(0, layers, at_once):
                self.route_together(range(first, first + at_once), arrival, landing, ask=False)
            self._tick(arrival)
            self.clock.held = False

    def _finish(self, forward: Forward) -> None:
        """Route what waits, with one question to the device for all layers; then move the clock."""
        arrival, landing = forward.arrival, forward.landing
        trusted = arrival.tokens == 1 and self.clock.prompted
        if forward.seen:
            assert self.stack is not None
            self._score(self.stack, forward, forward.seen)
        if self.waiting:
            self.route_together(self.waiting, arrival, landing, ask=trusted)
            self.waiting.clear()
        elif arrival.event and trusted:
            self._ask_for_faults()
        self._tick(arrival)
        self.forward = None

    def _tick(self, arrival: Arrival) -> None:
        """Move the clock; what has been given up is not taken back, so that no earlier event matters any more."""
        self.clock.finish(arrival)
        if not self.whole:
            self.clock.events = ()

    def route_together(self, indices: Sequence[int], arrival: Arrival, landing: Landing, *, ask: bool) -> None:
        """A routing event of some layers at once.

        Args:
            indices: which layers.
            arrival: which rows are due.
            landing: where the tokens of the forward that ends fell.
            ask: whether single tokens came before, whose faults the question to the device must also be about.
        """
        stack = self.stack or Stack.of([self.layers[index] for index in indices])
        planned = event.plan(stack, indices, arrival, landing)
        event.carry_out(planned, self._counted(planned, ask=ask), arrival, landing)

    def _counted(self, planned: Event, *, ask: bool) -> Tally:
        """How much a plan moves, and whether the forwards since the last event were what they had to be."""
        if planned.foreseen is not None:
            if ask:
                self._ask_for_faults()
            return planned.foreseen
        assert self.clock.faults is not None
        numbers = tally.measure(planned.stack, planned.move)
        astray, masked, *flat = torch.cat((self.clock.faults.long(), numbers.flatten())).tolist()
        refuse(astray, masked)
        lanes = numbers.shape[1]
        return tally.read(planned.stack, [flat[first : first + lanes] for first in range(0, len(flat), lanes)])

    def _ask_for_faults(self) -> None:
        assert self.clock.faults is not None
        refuse(*self.clock.faults.tolist())
