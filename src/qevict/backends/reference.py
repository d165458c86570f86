"""The reference backend: plain torch, correct before fast."""

from collections.abc import Iterator
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import Attended, AttentionBackend, EncodedSegment, Query, View
from qevict.contracts.values import Need
from qevict.shapes import Mass

_QUERY_BLOCK = 128


@attrs.frozen
class ReferenceAttention(AttentionBackend):
    """Decodes what is encoded, gathers each lane's windows side by side, and attends in fp32.

    Queries are taken 128 at a time, so that no L x L matrix exists; the decoded and gathered copies live only while one
    layer attends. Masses are the probabilities themselves, summed.
    """

    name: ClassVar[str] = "reference"
    provides: ClassVar[frozenset[Need]] = frozenset({Need.MASS, Need.KEYS, Need.VALUES})

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
    segments = [(view.sink_keys, view.sink_values), _dense(view)]
    segments += _encoded_segments(view)
    keys = torch.cat([keys.float() for keys, _ in segments], dim=2)
    values = torch.cat([values.float() for _, values in segments], dim=2)
    positions, present = _token_extents(view)
    return Gathered(keys, values, positions, present, view.sink_keys.shape[2], view.keys.shape[2])


def _dense(view: View) -> tuple[Tensor, Tensor]:
    keys, values = view.keys[:, view.slots], view.values[:, view.slots]
    return keys.transpose(0, 1).flatten(2, 3), values.transpose(0, 1).flatten(2, 3)


def _encoded_segments(view: View) -> list[tuple[Tensor, Tensor]]:
    segments, column = [], view.slots.shape[1]
    for segment in view.encoded:
        positions = view.positions[:, column : column + segment.slots.shape[1]]
        segments.append(_decode(segment, view, positions))
        column += segment.slots.shape[1]
    return segments


def _decode(segment: EncodedSegment, view: View, positions: Tensor) -> tuple[Tensor, Tensor]:
    assert view.rotary is not None
    slots, head_dim = segment.slots.flatten(), view.keys.shape[3]
    keys = segment.keys.decode({name: array[:, slots] for name, array in segment.key_codes.items()}, head_dim)
    values = segment.values.decode({name: array[:, slots] for name, array in segment.value_codes.items()}, head_dim)
    lanes = segment.slots.shape
    keys, values = keys.unflatten(1, lanes).transpose(0, 1), values.unflatten(1, lanes).transpose(0, 1)
    steps = torch.arange(keys.shape[3], device=positions.device)
    rotary_positions = (positions + view.rotary_offset[:, None])[:, None, :, None] + steps
    return view.rotary.rotate(keys, rotary_positions).flatten(2, 3), values.flatten(2, 3)


def _token_extents(view: View) -> tuple[Tensor, Tensor]:
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
    transposed = gathered.keys.transpose(-1, -2)
    for start in range(0, query.vectors.shape[3], _QUERY_BLOCK):
        block = query.vectors[:, :, :, start : start + _QUERY_BLOCK].float() * query.scaling
        seen_by = query.positions[:, start : start + _QUERY_BLOCK, None]
        allowed = gathered.present[:, None] & (gathered.positions[:, None] <= seen_by)
        logits = (block.flatten(2, 3) @ transposed).unflatten(2, block.shape[2:4])
        logits = logits.masked_fill_(~allowed[:, None, None], -torch.inf)
        lse = logits.logsumexp(-1)
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
