"""Masses of many queries, fast: softmax over blocks of queries, from which nothing but column sums is kept."""

import attrs
import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from qevict.backends.logits import capped
from qevict.contracts.backend import Known, Query
from qevict.shapes import Mass

_MIB = 2**20
_LEAST_QUERIES = 16
_HIDDEN = -1e30
"""What hides a logit that it is added to, many times faster than filling in would be. Beside any other logit the sum
weighs 0, and it is finite, so that a row of nothing else is no NaN."""


@attrs.frozen(eq=False)
class Columns:
    """Keys side by side: the sinks, then window after window.

    Attributes:
        keys: rotated.
        positions: true position of each.
        present: False for filler and for tokens that are not written.
        sinks: how many of the columns are sinks; column ``c`` of these holds position ``c``.
        window: tokens of one window.
        ascending_windows: so many of the first windows ascend in position, with filler behind them at most.
    """

    keys: Float[Tensor, "lanes heads columns head_dim"]
    positions: Int[Tensor, "lanes columns"]
    present: Bool[Tensor, "lanes columns"]
    sinks: int
    window: int
    ascending_windows: int = 0


@torch.no_grad()
def masses(query: Query, columns: Columns) -> tuple[Float32[Tensor, "lanes q_heads"], Mass]:
    """Mass of the sinks, and of each window, summed over the queries.

    What may be skipped is decided on the host. Windows that ascend in position, each a run of ``window`` positions
    after the sinks, lie at least as far as if none were missing: column ``c`` holds a position of at least ``c``. A
    block of queries, the last of which is at ``p`` at most, sees no column above ``p``, so these are not multiplied.
    Where columns up to ``q`` hold their own number and the block's first query is at ``q`` at least, all its queries
    see all of them, so these are not masked.

    Blocks are as long as a fixed amount of memory allows, whatever the threads. The softmax's own normalisation is used
    as it is: measured beside passing on a known log-sum-exp, or dividing by the sums of the rows while adding up the
    columns, it is as fast or faster.

    Args:
        query: who asks; pads see nothing and give nothing.
        columns: what is there to be seen; every query that is no pad sees some of it.
    """
    known = query.known
    lanes, heads, group, count, head_dim = query.vectors.shape
    width = columns.positions.shape[1]
    device = query.vectors.device
    total = torch.zeros(lanes, heads * group, width, device=device)
    if width and count:
        on_cpu = device.type == "cpu"
        sizes = _Sizes.fit(heads, group, count, width, head_dim, on_cpu=on_cpu)
        scratch = total.new_empty(min(sizes.lanes, lanes) * heads * group * sizes.queries * width)
        for first in range(0, lanes, sizes.lanes):
            part = slice(first, first + sizes.lanes)
            own = _lanes_of(columns, part, clean=_seen_by_some(known, columns, 0) > known.shortest)
            _add_lanes(_asked_by(query, part), own, known, scratch, sizes.queries, total[part])
    sinks, windows = total[..., : columns.sinks], total[..., columns.sinks :]
    return sinks.sum(-1), windows.unflatten(-1, (-1, columns.window)).sum(-1)


@attrs.frozen
class _Sizes:
    """Lanes and queries that are taken at once."""

    lanes: int
    queries: int

    @classmethod
    def fit(cls, heads: int, group: int, count: int, width: int, head_dim: int, *, on_cpu: bool) -> "_Sizes":
        """As many as the memory allows: what fits into caches on a CPU, what keeps an accelerator busy elsewhere."""
        most, budget, copies = (64, 24 * _MIB, 1) if on_cpu else (256, 96 * _MIB, 2)
        row, keys = heads * width * 4, 2 * head_dim  # in fp32, and once more without what is not there
        queries = min(count, most, max(_LEAST_QUERIES, (budget // row - keys) // (group * copies)))
        return cls(max(1, budget // (row * (group * queries * copies + keys))), queries)


def _asked_by(query: Query, part: slice) -> Query:
    sinks = None if query.sink_logits is None else query.sink_logits[part]
    return attrs.evolve(query, vectors=query.vectors[part], positions=query.positions[part], sink_logits=sinks)


def _lanes_of(columns: Columns, part: slice, *, clean: bool) -> Columns:
    """Some lanes, with keys in fp32; ``clean`` where keys are multiplied that are not there, and may be no numbers."""
    keys, present = columns.keys[part].float(), columns.present[part]
    keys = torch.where(present[:, None, :, None], keys, 0.0) if clean else keys
    return attrs.evolve(columns, keys=keys, positions=columns.positions[part], present=present)


def _add_lanes(query: Query, columns: Columns, known: Known, scratch: Tensor, block: int, total: Tensor) -> None:
    """Add the masses of some lanes' queries, block after block, by column."""
    count = query.vectors.shape[3]
    keys = columns.keys.flatten(0, 1).transpose(1, 2)
    for first in range(0, count, block):
        behind = min(first + block, count)
        seen = _seen_by_some(known, columns, count - behind)
        if seen:
            sure = min(_seen_by_all(known, count - 1 - first), seen)
            positions = query.positions[:, first:behind]
            asked = _scaled(query.vectors[:, :, :, first:behind], positions >= 0, query.scaling)
            logits = capped(_logits(asked, keys[..., :seen], scratch), query.softcap)
            logits[..., sure:] += _HIDDEN * _hidden(columns, positions, slice(sure, seen))[:, None, None]
            total[..., :seen] += _probability(logits, positions >= 0, query.sink_logits)


def _seen_by_some(known: Known, columns: Columns, later: int) -> int:
    """Columns from the left beyond which a query with that many behind it, and any before it, sees nothing."""
    width = columns.positions.shape[1]
    if known.longest is None or columns.sinks + columns.ascending_windows * columns.window < width:
        return width
    return min(max(0, known.longest - known.spacing * later), width)


def _seen_by_all(known: Known, later: int) -> int:
    """Columns from the left that a query with that many behind it, and any after it, sees in full."""
    return max(0, known.shortest - known.spacing * later)


def _scaled(vectors: Tensor, real: Tensor, scaling: float) -> Tensor:
    """Queries in fp32; a pad's may be no number, and becomes 0."""
    return torch.where(real[:, None, None, :, None], vectors.float() * scaling, 0.0)


def _logits(asked: Tensor, keys: Tensor, scratch: Tensor) -> Tensor:
    """``[lanes, heads, group, queries, columns]``; the query heads of a KV head are rows of one product."""
    lanes, heads, group, count, head_dim = asked.shape
    shape = (lanes * heads, group * count, keys.shape[2])
    logits = scratch[: shape[0] * shape[1] * shape[2]].view(shape)
    torch.bmm(asked.reshape(*shape[:2], head_dim), keys, out=logits)
    return logits.view(lanes, heads, group, count, -1)


def _hidden(columns: Columns, positions: Tensor, doubtful: slice) -> Tensor:
    """``[lanes, queries, columns]`` in fp32: 1 where a query does not see one of the doubtful columns."""
    hidden = columns.positions[:, None, doubtful] > positions[:, :, None]
    return (hidden | ~columns.present[:, None, doubtful]).float()


def _softmax(logits: Tensor) -> Tensor:
    """On a CPU each row is written where it was; elsewhere nobody promises that it may be."""
    return torch.softmax(logits, -1, out=logits) if logits.is_cpu else torch.softmax(logits, -1)


def _probability(logits: Tensor, real: Tensor, sinks: Tensor | None) -> Tensor:
    """``[lanes, q_heads, columns]`` summed over the queries.

    As a product, which reads the block once, leaves out pads for nothing, and leaves the sinks their share for little:
    the largest probability among the columns tells their log-sum-exp.
    """
    lanes, heads, group, count, width = logits.shape
    weights = real[:, None, None].to(logits.dtype).expand(lanes, heads, group, count)
    if sinks is None:
        probability = _softmax(logits)
    else:
        largest = logits.amax(-1)
        probability = _softmax(logits)
        weights = weights * (largest - probability.amax(-1).log() - sinks[..., None]).sigmoid()
    products = weights.reshape(-1, 1, count) @ probability.reshape(-1, count, width)
    return products.view(lanes, heads * group, width)
