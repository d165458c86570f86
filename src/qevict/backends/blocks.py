"""A pool read in place: cut into blocks of equal length, so that one batched product serves lanes of any length.

A *strip* is what one KV head holds of one lane. In a pool ``[heads, slots, window, head_dim]`` the strips lie one after
another, each as long as its lane's region. If they are equally long, a block is a strip. Otherwise blocks are shorter
than the shortest strip, so that a block reaches into two strips at most; it is read for the strip that it begins in,
and the few blocks that reach into a second one are read once more, as a copy, for that one.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import attrs
import torch
from torch import Tensor

from qevict.transfer import to_device

_LONGEST_SLOTS = 64
"""Most slots of a block where strips differ: long enough for a matrix product."""

_BLOCKS_PER_STRIP = 6
"""Blocks that the shortest strip is cut into: what lies across two strips, and is copied, is a sixth of it at most."""


@attrs.frozen(eq=False)
class Blocks:
    """Some blocks of a pool, of equal length.

    Attributes:
        first: flat slot (of ``heads * slots``) that each block begins with.
        slots: slots of a block.
        strips: strip that each block is read for; None where block and strip are the same.
        picked: which blocks of the pool these are, if they are copied out; None for blocks side by side.
    """

    first: tuple[int, ...]
    slots: int
    strips: tuple[int, ...] | None
    picked: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """How many blocks."""
        return len(self.first)

    def tokens(self, pool: Tensor) -> Tensor:
        """``[heads, slots, window, head_dim]`` as ``[blocks, tokens, head_dim]``; in place for blocks side by side."""
        flat = pool.flatten(0, 1)
        start = self.first[0] if self.picked is None else 0
        count = self.count if self.picked is None else max(self.picked) + 1
        blocks = flat[start : start + count * self.slots].view(count, -1, flat.shape[-1])
        own: Tensor = blocks if self.picked is None else blocks[to_device(self.picked, pool.device)]
        return own

    def by_slot(self, table: Tensor) -> Tensor:
        """``[heads * slots, ...]`` as ``[blocks, slots of a block, ...]``."""
        if self.picked is None:
            start = self.first[0]
            own: Tensor = table[start : start + self.count * self.slots].unflatten(0, (self.count, self.slots))
            return own
        steps = torch.arange(self.slots, device=table.device)
        return table[to_device(self.first, table.device)[:, None] + steps]

    def add_by_slot(self, table: Tensor, amounts: Tensor) -> None:
        """Add ``[blocks, slots of a block, ...]`` to a table ``[heads * slots, ...]``."""
        if self.picked is None:
            self.by_slot(table).add_(amounts)
        else:
            steps = torch.arange(self.slots, device=table.device)
            flat = to_device(self.first, table.device)[:, None] + steps
            table.index_add_(0, flat.flatten(), amounts.flatten(0, 1))


def cut(regions: Sequence[int], heads: int) -> tuple[Blocks, ...]:
    """Cut a pool into blocks.

    Args:
        regions: slots of each lane.
        heads: KV heads of a lane.

    Returns:
        Blocks that together reach every strip: one group where strips are equally long, up to three otherwise. Where a
        block has slots of other strips than its own, they must be masked.
    """
    strips = [region for _ in range(heads) for region in regions]
    ends = [*accumulate(strips, initial=0)]
    if len({*strips}) == 1:
        return (Blocks(tuple(ends[:-1]), strips[0], None),) if strips[0] else ()
    size = max(1, min(_LONGEST_SLOTS, min(strip for strip in strips if strip) // _BLOCKS_PER_STRIP))
    begins_in = _owners(ends, size)
    whole = ends[-1] // size
    groups = [Blocks(tuple(range(0, whole * size, size)), size, begins_in[:whole])]
    crossing = [
        (block, strip + 1 + _empty_after(strips, strip + 1))
        for block, strip in enumerate(begins_in[:whole])
        if (block + 1) * size > ends[strip + 1]
    ]
    if crossing:
        picked, second = zip(*crossing, strict=True)
        groups.append(Blocks(tuple(block * size for block in picked), size, second, picked))
    rest = ends[-1] - whole * size
    if rest:
        groups += [Blocks((whole * size,), rest, (strip,)) for strip in _reached(ends, whole * size)]
    return tuple(groups)


def _owners(ends: Sequence[int], size: int) -> tuple[int, ...]:
    """Strip that holds the first slot of each block."""
    owners, strip = [], 0
    for first in range(0, ends[-1], size):
        while ends[strip + 1] <= first:
            strip += 1
        owners.append(strip)
    return tuple(owners)


def _empty_after(strips: Sequence[int], strip: int) -> int:
    """Empty strips from ``strip`` on."""
    count = 0
    while not strips[strip + count]:
        count += 1
    return count


def _reached(ends: Sequence[int], first: int) -> list[int]:
    """Strips with slots from ``first`` on."""
    return [strip for strip, (low, high) in enumerate(pairwise(ends)) if high > max(low, first)]
