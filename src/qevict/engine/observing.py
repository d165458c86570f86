"""What a forward shows of its layers to the scorer: nothing but what it has declared a need of."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from qevict.backends.reference import gather
from qevict.contracts.backend import Query, View
from qevict.contracts.values import Held, Need, Observation
from qevict.engine.forward import Forward, Incoming, Seen
from qevict.engine.landing import per_lane
from qevict.engine.layer import Layer
from qevict.engine.records import Grid
from qevict.engine.stack import Stack
from qevict.engine.waiting import Asked
from qevict.transfer import to_device

_SINGLE_QUERIES = frozenset({Need.MASS_BY_QUERY, Need.QUERIES})


def asked(layer: Layer, incoming: Incoming, vectors: Tensor, positions: Tensor, *, padded: bool) -> Query:
    """Some of a forward's queries, by lane, and what the model does to their logits."""
    return layer.query(
        vectors, positions, incoming.scaling, padded=padded, softcap=incoming.softcap, sink_logits=incoming.sink_logits
    )


def observe(stack: Stack, grid: Grid, forward: Forward, seen: Sequence[Seen]) -> Observation:
    """Put together what the scorer asked to be shown, of layers that have taken the forward's tokens in.

    Args:
        stack: the layers; one alone if :func:`shown_alone`.
        grid: their records.
        forward: what all layers share of the forward.
        seen: what each of them was given, and its masses.
    """
    wiring, landing = stack.wiring, forward.landing
    needs = wiring.policy.scorer.needs
    observation = Observation(
        columns=stack.columns(landing),
        windows=grid.shape[1],
        mass=_masses(stack, grid, seen),
        stands_for=forward.look.stands_for,
        keys=_side_by_side([stack.by_lane(own.incoming.keys) for own in seen]) if Need.KEYS in needs else None,
        values=_side_by_side([stack.by_lane(own.incoming.values) for own in seen]) if Need.VALUES in needs else None,
        lanes_per_row=wiring.lanes_per_row,
        ends_prompt=forward.arrival.whole_prompt,
        first=_first(stack, forward) if Need.FIRST_LOOKS in needs else None,
        positions=_positions(stack, grid) if Need.POSITIONS in needs else None,
        rotary=wiring.rotary if Need.ROTARY in needs else None,
    )
    alone = shown_alone(needs, forward)
    return _with_own(observation, stack.layers[0], forward, seen[0].incoming) if alone else observation


def shown_alone(needs: frozenset[Need], forward: Forward) -> bool:
    """The scorer is to be shown what is put together layer by layer; or layers are not to wait for one another."""
    return forward.places is None or Need.OUTPUT_PROJECTION in needs or _shows_held(needs, forward)


def _shows_held(needs: frozenset[Need], forward: Forward) -> bool:
    return (Need.HELD in needs and forward.arrival.event) or (Need.PROMPT in needs and forward.arrival.whole_prompt)


def _with_own(observation: Observation, layer: Layer, forward: Forward, incoming: Incoming) -> Observation:
    """What one layer shows by itself."""
    needs, backend = layer.wiring.policy.scorer.needs, layer.wiring.backend
    single = _single_queries(layer, forward, incoming) if needs & _SINGLE_QUERIES else None
    by_query = single if Need.MASS_BY_QUERY in needs else None
    return attrs.evolve(
        observation,
        queries=single.vectors if single is not None and Need.QUERIES in needs else None,
        asked=None if single is None else single.positions,
        output=incoming.output() if incoming.output and Need.OUTPUT_PROJECTION in needs else None,
        mass_by_query=None if by_query is None else backend.mass_by_query(by_query, layer.view(forward.landing)),
        held=_held(layer.view(forward.landing)) if _shows_held(needs, forward) else None,
    )


def _masses(stack: Stack, grid: Grid, seen: Sequence[Seen]) -> Tensor | None:
    """By column of the rectangle of all layers, of which a layer may lack some."""
    found = [own.mass for own in seen if own.mass is not None]
    if not found:
        return None
    widths = [(sum(own),) if stack.even else own for own in (layer.records.widths for layer in stack.layers)]
    if all(own == grid.widths for own in widths):
        return _side_by_side(found)
    masses = found[0].new_zeros(grid.lanes, found[0].shape[1], grid.shape[1])
    for mass, own, into in zip(found, widths, masses.split(stack.lanes_per_layer), strict=True):
        begin = first = 0
        for width, room in zip(own, grid.widths, strict=True):
            into.narrow(2, first, width).copy_(mass.narrow(2, begin, width))
            begin, first = begin + width, first + room
    return masses


def _side_by_side(by_layer: Sequence[Tensor]) -> Tensor:
    return by_layer[0] if len(by_layer) == 1 else torch.cat([*by_layer])


def _single_queries(layer: Layer, forward: Forward, incoming: Incoming) -> Query | None:
    """The queries that are looked at; those of a prompt's pieces wait for its end."""
    look, arrival = forward.look, forward.arrival
    if not arrival.in_prompt:
        return None
    query = asked(layer, incoming, incoming.query[:, :, look.slots], look.positions, padded=True)
    waiting = layer.asked
    if waiting is not None:
        vectors = torch.cat((waiting.vectors, query.vectors), dim=3)
        query = attrs.evolve(query, vectors=vectors, positions=torch.cat((waiting.positions, query.positions), dim=1))
    layer.asked = None if arrival.whole_prompt else Asked(query.vectors, query.positions)
    return query if arrival.whole_prompt else None


def _positions(stack: Stack, grid: Grid) -> Tensor:
    policy = stack.wiring.policy
    positions = grid.spread(stack.records.window).long() * policy.window_tokens + policy.sink_tokens
    return positions if grid.present is None else torch.where(grid.present, positions, -1)


def _first(stack: Stack, forward: Forward) -> Tensor | None:
    first = forward.look.first
    if not any(first):
        return None
    rows = to_device(first, stack.records.window.device, torch.bool)
    return stack.for_every_layer(per_lane(rows, stack.wiring.lanes_per_row))


def _held(view: View) -> Held:
    gathered = gather(view)
    lanes, windows = view.windows.shape
    columns = torch.arange(windows, device=view.windows.device).repeat_interleave(gathered.window)
    columns = torch.cat((columns.new_full((gathered.sinks,), -1), columns)).expand(lanes, -1)
    return Held(
        keys=gathered.keys,
        values=gathered.values,
        positions=torch.where(gathered.present, gathered.positions, -1),
        rotary_positions=gathered.positions + view.rotary_offset[:, None],
        columns=torch.where(gathered.present, columns, -1),
    )
