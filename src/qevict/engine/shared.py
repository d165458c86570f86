"""What the windows of a sequence have in common: the statistics that a quantizer does not keep by window."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from qevict.contracts.quantizer import Origin
from qevict.contracts.values import Codes
from qevict.engine.layer import Layer, part
from qevict.engine.stack import Stack
from qevict.engine.tally import Tally


def by_line(stack: Stack, segment: int, lines: Tensor) -> Codes:
    """What each of some lines shares in a segment, ``[heads, lines, ...]``."""
    names = stack.layers[0].shared[segment]
    if not names:
        return {}
    lanes = stack.lane_of[lines]
    return {name: torch.cat([layer.shared[segment][name] for layer in stack.layers], 1)[:, lanes] for name in names}


def fit(stack: Stack, tally: Tally, source: int, target: int, vectors: tuple[Tensor, Tensor]) -> None:
    """Fit what lanes share in a tier that holds none of their codes yet, to the windows that are encoded first.

    Args:
        stack: what is moved.
        tally: how much; its windows come from the hottest source first.
        source: segment that the windows come from.
        target: segment that they are encoded for.
        vectors: pre-RoPE keys, and values, of the windows, lane after lane.
    """
    if not stack.layers[0].shared[target]:
        return
    live, counts = stack.live[target], tally.carried[source][target]
    ends = itertools.accumulate(counts, initial=0)
    for lane, (first, last) in enumerate(itertools.pairwise(ends)):
        encoded_before = live[lane] or any(tally.carried[earlier][target][lane] for earlier in range(source))
        if first < last and not encoded_before:
            layer, own = divmod(lane, stack.lanes_per_layer)
            _fit_lane(stack.layers[layer], target, own, tuple(each[:, first:last] for each in vectors))


def _fit_lane(layer: Layer, target: int, lane: int, vectors: Sequence[Tensor]) -> None:
    wiring, shared = layer.wiring, layer.shared[target]
    origin = Origin(layer.index, wiring.heads_of(lane))
    for prefix, quantizer, own in zip(("keys.", "values."), wiring.codecs[target - 1], vectors, strict=True):
        for name, array in quantizer.fit(own, origin).items():
            shared[prefix + name][:, lane] = array


def select(layer: Layer, lanes: Tensor) -> None:
    """Keep some lanes, in that order."""
    layer.shared = tuple({name: array[:, lanes] for name, array in own.items()} for own in layer.shared)


def tensors(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    """Every array by segment and name."""
    for segment, own in enumerate(layer.shared):
        for name, array in own.items():
            yield f"shared.{segment}.{name}", array


def refill(layer: Layer, found: Mapping[str, Tensor]) -> None:
    """Put back what :func:`tensors` gave."""
    layer.shared = tuple(dict(part(found, f"shared.{segment}.")) for segment in range(len(layer.shared)))
