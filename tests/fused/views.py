"""Views of one layer, as the engine lends them, small enough to be attended to many times."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import EncodedSegment, Query, View
from qevict.contracts.quantizer import Quantizer
from qevict.contracts.rotary import Rotary
from qevict.contracts.values import Codes
from qevict.testing.scenes import encoded
from qevict.testing.values import normal


@attrs.frozen
class Sizes:
    """What a view is made of; every lane has all windows, and the last dense one is partly written."""

    lanes: int = 1
    heads: int = 1
    group: int = 1
    head_dim: int = 64
    window: int = 8
    sinks: int = 4
    dense: int = 2
    coded: int = 3
    dtype: torch.dtype = torch.float32
    turning: int | None = None


def make(sizes: Sizes, codecs: Sequence[tuple[Quantizer, Quantizer]], seed: int = 0) -> tuple[Query, View]:
    """A query of one token, and what it attends to: windows of codes lie before the dense ones."""
    lanes, heads, window, head_dim = sizes.lanes, sizes.heads, sizes.window, sizes.head_dim
    windows = sizes.coded * len(codecs) + sizes.dense
    order = torch.arange(windows).expand(lanes, -1)
    by_segment = [order[:, windows - sizes.dense :]]
    segments = []
    for index, (keys, values) in enumerate(codecs):
        by_segment.append(order[:, index * sizes.coded : (index + 1) * sizes.coded])
        shape = (heads, sizes.coded, window, head_dim)
        key_codes, value_codes = (
            _of_lanes(quantizer, seed + 10 * index + side, lanes, shape) for side, quantizer in ((1, keys), (2, values))
        )
        hidden = torch.zeros(lanes * sizes.coded, dtype=torch.bool)
        regions = (sizes.coded,) * lanes
        slots = _slots(lanes, sizes.coded)
        segments.append(EncodedSegment(keys, values, key_codes, value_codes, slots, regions, hidden))
    length = sizes.sinks + windows * window - min(window - 1, 3)
    pool = (heads, lanes * sizes.dense, window, head_dim)
    sinks = (lanes, heads, sizes.sinks, head_dim)
    pairs = (sizes.turning or head_dim) // 2
    hidden = torch.zeros(lanes * sizes.dense, window, dtype=torch.bool)
    if sizes.dense:
        hidden[sizes.dense - 1 :: sizes.dense, window - min(window - 1, 3) :] = True
    view = View(
        sink_keys=normal(seed + 3, *sinks).to(sizes.dtype),
        sink_values=normal(seed + 4, *sinks).to(sizes.dtype),
        keys=normal(seed + 5, *pool).to(sizes.dtype),
        values=normal(seed + 6, *pool).to(sizes.dtype),
        slots=_slots(lanes, sizes.dense),
        regions=(sizes.dense,) * lanes,
        hidden=hidden,
        encoded=tuple(segments),
        windows=torch.cat(by_segment, dim=1).int(),
        present=None,
        lengths=torch.full((lanes,), length),
        rotary=Rotary(1000.0 ** -(torch.arange(pairs) / pairs), amplitude=1.1),
        rotary_offset=torch.zeros(lanes, dtype=torch.int64),
    )
    asking = 2 * normal(seed + 7, lanes, heads, sizes.group, 1, head_dim).to(sizes.dtype)
    return Query(asking, torch.full((lanes, 1), length - 1), head_dim**-0.5, padded=False), view


def _of_lanes(quantizer: Quantizer, seed: int, lanes: int, shape: tuple[int, ...]) -> Codes:
    """Codes of all lanes, each fitted for itself to numbers with a mean of its own."""
    each = [encoded(quantizer, normal(seed + 100 * lane, *shape) + lane / 4) for lane in range(lanes)]
    return {name: torch.cat([own[name] for own in each], dim=1) for name in each[0]}


def _slots(lanes: int, each: int) -> Tensor:
    return torch.arange(lanes * each, dtype=torch.int32).view(lanes, each)
