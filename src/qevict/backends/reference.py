"""The reference backend: plain torch, correct before fast."""

from collections.abc import Iterator
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.backends.logits import capped, sink_logits
from qevict.contracts.backend import Attended, AttentionBackend, Query, View
from qevict.contracts.values import ATTENDED, Codes, Need
from qevict.shapes import Mass, MassByQuery

_QUERY_BLOCK = 128


@attrs.frozen
class ReferenceAttention(AttentionBackend):
    """Decodes what is encoded, gathers each lane's windows side by side, and attends in fp32.

    Queries are taken 128 at a time, so that no L x L matrix exists; the decoded and gathered copies live only while one
    layer attends. Masses are the probabilities themselves, summed.
    """

    name: ClassVar[str] = "reference"
    provides: ClassVar[frozenset[Need]] = ATTENDED

    def attend(self, query: Query, view: View, *, want_mass: bool) -> Attended:
        """Softmax attention over all segments at once."""
        gathered = gather(view)
        outputs, lses, total = [], [], _no_mass(query, gathered)
        for probability, lse in _probabilities(query, gathered):
            outputs.append(torch.einsum("lhgqt,lhtd->lhgqd", probability, gathered.values))
            lses.append(lse)
            if want_mass:
                total += _by_window(probability, gathered)
        output, lse = torch.cat(outputs, dim=3).to(query.vectors.dtype), torch.cat(lses, dim=3)
        if not want_mass:
            return Attended(output, lse)
        return Attended(output, lse, mass=total[..., 1:], protected_mass=total[..., 0])

    def mass(self, query: Query, view: View) -> Mass:
        """A blocked second pass that keeps only the sums."""
        gathered = gather(view)
        total = _no_mass(query, gathered)
        for probability, _ in _probabilities(query, gathered):
            total += _by_window(probability, gathered)
        return total[..., 1:]

    def mass_by_query(self, query: Query, view: View) -> MassByQuery:
        """A blocked second pass."""
        return masses_by_query(query, view)


def masses_by_query(query: Query, view: View) -> MassByQuery:
    """Mass of each query on each window: for a few queries, since nothing is summed over them."""
    gathered = gather(view)
    blocks = [
        probability[..., gathered.sinks :].unflatten(-1, (-1, gathered.window)).sum(-1).flatten(1, 2)
        for probability, _ in _probabilities(query, gathered)
    ]
    return torch.cat(blocks, dim=2)


@attrs.frozen(eq=False)
class Gathered:
    """All that a view holds, decoded and side by side: sinks first, then window after window.

    Attributes:
        keys: ``[lanes, heads, tokens, head_dim]``, rotated, fp32.
        values: likewise.
        positions: ``[lanes, tokens]`` true positions.
        present: ``[lanes, tokens]``, False for filler and for tokens not written yet.
        sinks: how many of the tokens are sinks.
        window: tokens of one window.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    present: Tensor
    sinks: int
    window: int


def gather(view: View) -> Gathered:
    """Decode and gather a view; a transient copy."""
    values = [view.sink_values, _in_columns(view.values, view.slots)]
    values += [
        _by_lane(segment.values.decode(_codes(segment.value_codes, segment.slots), view.keys.shape[3]), segment.slots)
        for segment in view.encoded
    ]
    positions, present = token_extents(view)
    sinks, window = view.sink_keys.shape[2], view.keys.shape[2]
    whole = torch.cat([own.float() for own in values], dim=2)
    return Gathered(gather_keys(view), whole, positions, present, sinks, window)


def gather_keys(view: View) -> Tensor:
    """All keys ``[lanes, heads, tokens, head_dim]`` in fp32, rotated: sinks first, then column after column."""
    keys, column = [view.sink_keys, _in_columns(view.keys, view.slots)], view.slots.shape[1]
    for segment in view.encoded:
        assert view.rotary is not None
        decoded = segment.keys.decode(_codes(segment.key_codes, segment.slots), view.keys.shape[3])
        first = view.positions[:, column : column + segment.slots.shape[1]] + view.rotary_offset[:, None]
        steps = torch.arange(decoded.shape[2], device=first.device)
        positions = (first[..., None] + steps).flatten(1)
        keys.append(view.rotary.rotate(_by_lane(decoded, segment.slots), positions[:, None]))
        column += segment.slots.shape[1]
    return torch.cat([own.float() for own in keys], dim=2)


def _in_columns(pool: Tensor, slots: Tensor) -> Tensor:
    """Blocks of a pool as ``[lanes, heads, tokens, head_dim]``."""
    return pool[:, slots].transpose(0, 1).flatten(2, 3)


def _codes(pool: Codes, slots: Tensor) -> Codes:
    """Codes of every column of every lane."""
    return {name: array[:, slots.flatten()] for name, array in pool.items()}


def _by_lane(blocks: Tensor, slots: Tensor) -> Tensor:
    """Blocks of every column of every lane as ``[lanes, heads, tokens, head_dim]``."""
    lanes: Tensor = blocks.unflatten(1, slots.shape).transpose(0, 1)
    return lanes.flatten(2, 3)


def token_extents(view: View) -> tuple[Tensor, Tensor]:
    """True positions of all columns' tokens, ``[lanes, tokens]``, and which of them are there."""
    lanes, device = view.windows.shape[0], view.windows.device
    window, sinks = view.keys.shape[2], view.sink_keys.shape[2]
    inside = (view.positions[..., None] + torch.arange(window, device=device)).flatten(1)
    positions = torch.cat((torch.arange(sinks, device=device).expand(lanes, sinks), inside), dim=1)
    present = torch.cat(
        (torch.ones(lanes, sinks, dtype=torch.bool, device=device), (~view.absent).repeat_interleave(window, dim=1)),
        dim=1,
    )
    return positions, present & (positions < view.lengths[:, None])


def _probabilities(query: Query, gathered: Gathered) -> Iterator[tuple[Tensor, Tensor]]:
    """Softmax probabilities ``[lanes, heads, group, block, tokens]`` and log-sum-exp, block after block of queries."""
    transposed, sinks = gathered.keys.transpose(-1, -2), sink_logits(query)
    for start in range(0, query.vectors.shape[3], _QUERY_BLOCK):
        block = query.vectors[:, :, :, start : start + _QUERY_BLOCK].float() * query.scaling
        seen_by = query.positions[:, start : start + _QUERY_BLOCK, None]
        allowed = gathered.present[:, None] & (gathered.positions[:, None] <= seen_by)
        logits = capped(block.flatten(2, 3) @ transposed, query.softcap).unflatten(2, block.shape[2:4])
        logits = logits.masked_fill_(~allowed[:, None, None], -torch.inf)
        lse = logits.logsumexp(-1)
        lse = lse if sinks is None else torch.logaddexp(lse, sinks[..., start : start + _QUERY_BLOCK])
        # A pad sees nothing: its lse is -inf, and -inf - -inf would be NaN where 0 is meant.
        floor = lse.clamp(min=torch.finfo(torch.float32).min)
        yield logits.sub_(floor[..., None]).exp_(), lse


def _no_mass(query: Query, gathered: Gathered) -> Tensor:
    lanes, heads, group = query.vectors.shape[:3]
    windows = (gathered.positions.shape[1] - gathered.sinks) // gathered.window
    return torch.zeros(lanes, heads * group, 1 + windows, device=query.vectors.device)


def _by_window(probability: Tensor, gathered: Gathered) -> Tensor:
    """``[lanes, q_heads, 1 + windows]``: mass of the sinks, then of each window, summed over the block's queries."""
    tokens = probability.sum(3).flatten(1, 2)
    sinks = tokens[..., : gathered.sinks].sum(-1, keepdim=True)
    return torch.cat((sinks, tokens[..., gathered.sinks :].unflatten(-1, (-1, gathered.window)).sum(-1)), dim=-1)
