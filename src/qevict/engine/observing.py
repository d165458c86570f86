"""What a forward shows of a layer to the scorer: nothing but what it has declared a need of."""

import attrs
import torch
from torch import Tensor

from qevict.backends.reference import gather
from qevict.contracts.backend import Query, View
from qevict.contracts.values import Held, Need, Observation
from qevict.engine.forward import Forward, Incoming
from qevict.engine.landing import per_lane
from qevict.engine.layer import Layer
from qevict.engine.records import Grid
from qevict.engine.waiting import Asked
from qevict.transfer import to_device

_SINGLE_QUERIES = frozenset({Need.MASS_BY_QUERY, Need.QUERIES})


def asked(layer: Layer, incoming: Incoming, vectors: Tensor, positions: Tensor, *, padded: bool) -> Query:
    """Some of a forward's queries, by lane, and what the model does to their logits."""
    return layer.query(
        vectors, positions, incoming.scaling, padded=padded, softcap=incoming.softcap, sink_logits=incoming.sink_logits
    )


def observe(
    layer: Layer, grid: Grid, forward: Forward, line: Tensor, mass: Tensor | None, incoming: Incoming
) -> Observation:
    """Put together what the scorer asked to be shown.

    Args:
        layer: what has taken the forward's tokens in.
        grid: its records.
        forward: what all layers share of the forward.
        line: the table's line of each new token's window; these lie in the dense segment, whose columns come first.
        mass: by window, if it was wanted.
        incoming: what the layer was given.
    """
    wiring, landing, arrival = layer.wiring, forward.landing, forward.arrival
    needs, columns = wiring.policy.scorer.needs, line - layer.records.starts.narrow(1, 0, 1)
    single = _single_queries(layer, forward, incoming) if needs & _SINGLE_QUERIES else None
    shown = Observation(
        columns=columns if landing.of_windows is None else torch.where(line < 0, -1, columns),
        windows=grid.shape[1],
        mass=mass,
        stands_for=forward.look.stands_for,
        keys=layer.by_lane(incoming.keys) if Need.KEYS in needs else None,
        values=layer.by_lane(incoming.values) if Need.VALUES in needs else None,
        lanes_per_row=wiring.lanes_per_row,
        ends_prompt=arrival.whole_prompt,
        queries=single.vectors if single is not None and Need.QUERIES in needs else None,
        asked=None if single is None else single.positions,
        first=_first(layer, forward) if Need.FIRST_LOOKS in needs else None,
        rotary=wiring.rotary if Need.ROTARY in needs else None,
        output=incoming.output() if incoming.output and Need.OUTPUT_PROJECTION in needs else None,
    )
    by_query, held = single if Need.MASS_BY_QUERY in needs else None, _shows_held(needs, forward)
    if by_query is None and not held and Need.POSITIONS not in needs:
        return shown
    view = layer.view(grid, landing)
    return attrs.evolve(
        shown,
        mass_by_query=None if by_query is None else wiring.backend.mass_by_query(by_query, view),
        positions=_positions(view) if Need.POSITIONS in needs else None,
        held=_held(view) if held else None,
    )


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


def _positions(view: View) -> Tensor:
    return view.positions if view.present is None else torch.where(view.present, view.positions, -1)


def _first(layer: Layer, forward: Forward) -> Tensor | None:
    first = forward.look.first
    if not any(first):
        return None
    return per_lane(to_device(first, layer.sink_keys.device, torch.bool), layer.wiring.lanes_per_row)


def _shows_held(needs: frozenset[Need], forward: Forward) -> bool:
    return (Need.HELD in needs and forward.arrival.event) or (Need.PROMPT in needs and forward.arrival.whole_prompt)


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
