"""Fits what the codes of a lane have in common to the windows that a tier encodes first."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from qevict.contracts.quantizer import Origin
from qevict.contracts.values import Codes
from qevict.engine.layer import Layer
from qevict.engine.stack import Stack
from qevict.engine.tally import Tally


def by_line(stack: Stack, segment: int, lines: Tensor) -> Codes:
    """What each of some lines shares in a segment, ``[heads, lines, ...]``."""
    by_layer = [layer.shared.arrays[segment] for layer in stack.layers]
    lanes = stack.lane_of[lines] if by_layer[0] else lines
    return {name: torch.cat([own[name] for own in by_layer], 1)[:, lanes] for name in by_layer[0]}


def fit(stack: Stack, tally: Tally, source: int, target: int, vectors: tuple[Tensor, Tensor]) -> None:
    """Fit what lanes share in a tier that holds none of their codes yet.

    Args:
        stack: what is moved.
        tally: how much; its windows come from the hottest source first.
        source: segment that the windows come from.
        target: segment that they are encoded for.
        vectors: pre-RoPE keys, and values, of the windows, lane after lane.
    """
    if not stack.layers[0].shared.arrays[target]:
        return
    live, counts = stack.live[target], tally.carried[source][target]
    ends = itertools.accumulate(counts, initial=0)
    for lane, (first, last) in enumerate(itertools.pairwise(ends)):
        encoded_before = live[lane] or any(tally.carried[earlier][target][lane] for earlier in range(source))
        if first < last and not encoded_before:
            layer, own = divmod(lane, stack.lanes_per_layer)
            _fit_lane(stack.layers[layer], target, own, tuple(each[:, first:last] for each in vectors))


def _fit_lane(layer: Layer, target: int, lane: int, vectors: Sequence[Tensor]) -> None:
    wiring, arrays = layer.wiring, layer.shared.arrays[target]
    origin = Origin(layer.index, wiring.heads_of(lane))
    for prefix, quantizer, own in zip(("keys.", "values."), wiring.codecs[target - 1], vectors, strict=True):
        for name, array in quantizer.fit(own, origin).items():
            arrays[prefix + name][:, lane] = array
