"""What a view holds, segment after segment in the order of its slots, so that nothing is gathered."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import EncodedSegment, View
from qevict.transfer import to_device

FREE = 2**30
"""Position of a slot without a window: later than any query."""


@attrs.frozen(eq=False)
class Shelf:
    """One segment in the order of its slots.

    Attributes:
        keys: ``[heads, slots, window, head_dim]``, rotated.
        values: likewise.
        regions: slots of each lane.
        hidden: ``[slots]`` or ``[slots, window]`` what is free or not written yet.
        slots: ``[lanes, columns]`` slot of each column of the view, any where absent; None for sinks.
        first: first true position of the window in each slot, ``FREE`` where there is none; None until asked for.
    """

    keys: Tensor
    values: Tensor
    regions: tuple[int, ...]
    hidden: Tensor
    slots: Tensor | None
    first: Tensor | None = None


def shelves(view: View) -> list[Shelf]:
    """Sinks, dense windows, and what is encoded, decoded as a whole; segments without a slot are left out."""
    found, column = [], view.slots.shape[1]
    if view.sink_keys.shape[2]:
        found.append(sinks(view))
    if sum(view.regions):
        first = first_positions(view, view.slots, 0, sum(view.regions))
        found.append(Shelf(view.keys, view.values, view.regions, view.hidden, view.slots, first))
    for segment in view.encoded:
        found.append(decoded(view, segment, column))
        column += segment.slots.shape[1]
    return found


def sinks(view: View) -> Shelf:
    """The sinks as one window of each lane."""
    lanes, tokens = view.sink_keys.shape[0], view.sink_keys.shape[2]
    first = torch.zeros(lanes, dtype=torch.int64, device=view.windows.device)
    unwritten = torch.arange(tokens, device=first.device) >= view.lengths[:, None]  # in rows shorter than that
    return Shelf(view.sink_keys.transpose(0, 1), view.sink_values.transpose(0, 1), (1,) * lanes, unwritten, None, first)


def first_positions(view: View, slots: Tensor, column: int, capacity: int) -> Tensor:
    """First true position of the window in each slot; ``FREE`` where there is none.

    Args:
        view: what is read.
        slots: slot of each column of a segment.
        column: where its columns begin.
        capacity: slots of its pool.
    """
    columns = slice(column, column + slots.shape[1])
    table = torch.full((capacity + 1,), FREE, dtype=torch.int64, device=slots.device)
    if view.present is not None:
        slots = torch.where(view.present[:, columns], slots, capacity)
    table[slots] = view.positions[:, columns]
    return table[:capacity]


def decoded(view: View, segment: EncodedSegment, column: int) -> Shelf:
    """An encoded segment, rebuilt in fp32 and turned to its positions; its columns begin with ``column``."""
    assert view.rotary is not None
    head_dim, capacity = view.keys.shape[3], sum(segment.regions)
    first = first_positions(view, segment.slots, column, capacity)
    keys = segment.keys.decode(segment.key_codes, head_dim)
    values = segment.values.decode(segment.value_codes, head_dim).contiguous()
    steps = torch.arange(keys.shape[2], device=first.device)
    positions = (first + per_slot(view.rotary_offset, segment.regions))[:, None] + steps
    return Shelf(view.rotary.rotate(keys, positions), values, segment.regions, segment.hidden, segment.slots, first)


def per_slot(lanes: Tensor, regions: Sequence[int]) -> Tensor:
    """A value of each lane, for each slot of its region; one value alone stands for all."""
    if len(regions) == 1:
        return lanes
    counts = to_device(regions, lanes.device)
    return lanes.repeat_interleave(counts, output_size=sum(regions))
