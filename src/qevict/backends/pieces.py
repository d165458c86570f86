"""Attention in pieces, for lanes of any length: every block of every shelf, put together by log-sum-exp."""

from collections.abc import Sequence
from functools import partial

import attrs
import torch
from torch import Tensor

from qevict.backends.blocks import Blocks, cut
from qevict.backends.fused import fused_attention
from qevict.backends.logits import capped, sink_logits
from qevict.backends.merging import Part, Whole, merged
from qevict.backends.shelves import FREE, Shelf, per_slot, shelves
from qevict.contracts.backend import Attended, Query, View
from qevict.transfer import to_device

_QUERY_BLOCK = 256

_CAPPED_QUERY_BLOCK = 64
"""Queries that are taken at once where every logit is held: the fused operators know no cap."""


@attrs.frozen(eq=False)
class _Reading:
    """Some blocks of a shelf.

    Attributes:
        shelf: the segment.
        blocks: which blocks.
        strips: strip that each block is read for; None if each is its own.
        hidden: ``[blocks, tokens, keys]`` what the queries do not see.
    """

    shelf: Shelf
    blocks: Blocks
    strips: Tensor | None
    hidden: Tensor


def one_token(query: Query, view: View, *, want_mass: bool) -> Attended:
    """Attention of one token, which may be a pad, of each lane."""
    lanes, heads, group, _, head_dim = query.vectors.shape
    asking, found = _by_strip(query)[:, :, 0], shelves(view)
    readings = _readings(found, heads, _limits(query, view, heads))
    weighed = [_weigh(asking, reading, query.softcap) for reading in readings]
    whole = merged([*(part for part, _ in weighed), *_sink_part(query, slice(None))], heads * lanes)
    output = whole.output.view(heads, lanes, group, 1, head_dim).transpose(0, 1)
    lse = whole.lse.view(heads, lanes, group, 1).transpose(0, 1)
    answer = Attended(output.to(query.vectors.dtype), lse)
    if not want_mass:
        return answer
    pairs = list(zip(readings, weighed, strict=True))
    masses = [
        _masses(shelf, heads, group, [pair for pair in pairs if pair[0].shelf is shelf], whole) for shelf in found
    ]
    protected = masses.pop(0)[..., 0] if found[0].slots is None else answer.lse.new_zeros(lanes, heads * group)
    none = answer.lse.new_zeros(lanes, heads * group, 0)
    mass = torch.cat([none, *masses], 2).masked_fill(view.absent[:, None], 0)
    return attrs.evolve(answer, mass=mass, protected_mass=protected)


def many_tokens(query: Query, view: View) -> Attended:
    """Attention of many tokens of each lane, a block of queries after the other."""
    lanes, heads, group, tokens, head_dim = query.vectors.shape
    asking, found, limits = _by_strip(query), shelves(view), _limits(query, view, heads)
    size, attend_to = _QUERY_BLOCK, _fuse
    if query.softcap is not None:
        size, attend_to = _CAPPED_QUERY_BLOCK, partial(_fuse_capped, softcap=query.softcap)
    outputs, lses = [], []
    for start in range(0, tokens, size):
        those = slice(start, start + size)
        readings = _readings(found, heads, limits[:, those])
        parts = [attend_to(asking[:, :, those], reading) for reading in readings]
        whole = merged([*parts, *_sink_part(query, those)], heads * lanes)
        outputs.append(whole.output.unflatten(1, (group, -1)))
        lses.append(whole.lse.unflatten(1, (group, -1)))
    output = torch.cat(outputs, dim=2).view(heads, lanes, group, tokens, head_dim).transpose(0, 1)
    lse = torch.cat(lses, dim=2).view(heads, lanes, group, tokens).transpose(0, 1)
    return Attended(output.to(query.vectors.dtype), lse)


def _by_strip(query: Query) -> Tensor:
    """Queries ``[strips, group, tokens, head_dim]`` in fp32, scaled."""
    return (query.vectors.float() * query.scaling).transpose(0, 1).flatten(0, 1)


def _limits(query: Query, view: View, heads: int) -> Tensor:
    """First position that each query does not see, ``[strips, tokens]``: the one after its own, or its lane's end."""
    return torch.minimum(query.positions + 1, view.lengths[:, None]).repeat(heads, 1)


def _readings(found: Sequence[Shelf], heads: int, limits: Tensor) -> list[_Reading]:
    """All blocks of all shelves."""
    readings = []
    for shelf in found:
        for blocks in cut(shelf.regions, heads):
            strips = None
            if blocks.strips is not None:
                strips = to_device(blocks.strips, limits.device)
            own = limits if strips is None else limits[strips]
            hidden = _positions(shelf, blocks, strips, heads)[:, None] >= own[..., None]
            readings.append(_Reading(shelf, blocks, strips, hidden))
    return readings


def _positions(shelf: Shelf, blocks: Blocks, strips: Tensor | None, heads: int) -> Tensor:
    """True positions of the tokens of blocks ``[blocks, keys]``; ``FREE`` in what belongs to other strips."""
    assert shelf.first is not None
    window, device = shelf.keys.shape[2], shelf.first.device
    first = blocks.by_slot(shelf.first.repeat(heads))
    if strips is not None:
        regions = shelf.regions * heads
        owners = per_slot(torch.arange(len(regions), device=device), regions).expand(sum(regions))
        first = torch.where(blocks.by_slot(owners) == strips[:, None], first, FREE)
    return (first[..., None] + torch.arange(window, device=device)).flatten(1)


def _sink_part(query: Query, those: slice) -> list[Part]:
    """The sink logits, as a part of weight 1 without an output."""
    logits = sink_logits(query)
    if logits is None:
        return []
    own = logits[..., those].transpose(0, 1).flatten(0, 1).flatten(1)
    seen = own > -torch.inf
    top = own.clamp(min=torch.finfo(torch.float32).min)
    return [Part(None, top, seen.float(), own.new_zeros(*own.shape, query.vectors.shape[4]))]


def _weigh(asking: Tensor, reading: _Reading, softcap: float | None) -> tuple[Part, Tensor]:
    """Attention of one token of each strip to its blocks, and the weights ``[blocks, group, keys]`` before merging."""
    blocks, shelf = reading.blocks, reading.shelf
    own = asking if reading.strips is None else asking[reading.strips]
    weights = capped(torch.bmm(own, blocks.tokens(shelf.keys).float().transpose(1, 2)), softcap)
    weights.masked_fill_(reading.hidden, -torch.inf)
    top = weights.amax(2, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    weights = weights.sub_(top).exp_()
    output = torch.bmm(weights, blocks.tokens(shelf.values).float())
    return Part(reading.strips, top[..., 0], weights.sum(2), output), weights


def _masses(
    shelf: Shelf, heads: int, group: int, weighed: Sequence[tuple[_Reading, tuple[Part, Tensor]]], whole: Whole
) -> Tensor:
    """Masses ``[lanes, q_heads, columns]`` of a shelf, from weights that are there already."""
    table = whole.top.new_zeros(heads * sum(shelf.regions), group)
    for reading, (part, weights) in weighed:
        by_slot = weights.unflatten(2, (reading.blocks.slots, -1)).sum(3) * whole.share(part)[..., None]
        reading.blocks.add_by_slot(table, by_slot.transpose(1, 2))
    lanes = torch.arange(len(shelf.regions), device=table.device)[:, None]  # sinks: the slot of each lane
    slots = lanes if shelf.slots is None else shelf.slots
    by_column: Tensor = table.unflatten(0, (heads, -1))[:, slots]
    return by_column.permute(1, 0, 3, 2).flatten(1, 2)


def _fuse(asking: Tensor, reading: _Reading) -> Part:
    """Attention of many tokens of each strip to its blocks."""
    blocks, shelf, group = reading.blocks, reading.shelf, asking.shape[1]
    own = asking if reading.strips is None else asking[reading.strips]
    keys, values = (
        blocks.tokens(pool).float()[:, None].expand(-1, group, -1, -1) for pool in (shelf.keys, shelf.values)
    )
    output, lse = fused_attention(own, keys, values, reading.hidden[:, None])
    seen = lse > -torch.inf
    top = lse.clamp(min=torch.finfo(torch.float32).min)
    return Part(reading.strips, top.flatten(1), seen.float().flatten(1), output.flatten(1, 2))


def _fuse_capped(asking: Tensor, reading: _Reading, softcap: float) -> Part:
    """What :func:`_fuse` does, each query head of each token as one that asks alone."""
    hidden = reading.hidden.repeat(1, asking.shape[1], 1)
    return _weigh(asking.flatten(1, 2), attrs.evolve(reading, hidden=hidden), softcap)[0]
