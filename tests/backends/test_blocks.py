"""Pools cut into blocks: every slot is read once for its strip."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from qevict.backends.blocks import cut

REGIONS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 90)), min_size=1, max_size=6)


@given(REGIONS, st.integers(1, 3))
def test_every_slot_is_read_once_for_its_strip(regions: list[int], heads: int) -> None:
    """Slots of other strips in a block are not counted: they are masked."""
    owners = [strip for strip, region in enumerate(regions * heads) for _ in range(region)]
    read = Counter[int]()
    for blocks in cut(regions, heads):
        for number, first in enumerate(blocks.first):
            strip = number if blocks.strips is None else blocks.strips[number]
            assert first + blocks.slots <= len(owners)
            read.update(slot for slot in range(first, first + blocks.slots) if owners[slot] == strip)
    assert read == Counter(range(len(owners)))


@given(REGIONS, st.integers(1, 3))
def test_blocks_hold_the_tokens_and_table_entries_of_their_slots(regions: list[int], heads: int) -> None:
    slots = sum(regions)
    pool = torch.arange(heads * slots * 2 * 3.0).view(heads, slots, 2, 3)
    table = torch.arange(heads * slots)
    sums = torch.zeros(heads * slots, 1)
    for blocks in cut(regions, heads):
        wanted = torch.tensor([[*range(first, first + blocks.slots)] for first in blocks.first])
        assert torch.equal(blocks.by_slot(table), wanted)
        assert torch.equal(blocks.tokens(pool), pool.flatten(0, 1)[wanted].flatten(1, 2))
        blocks.add_by_slot(sums, torch.ones(*wanted.shape, 1))
    assert bool((sums >= 1).all())


def test_equal_strips_are_blocks_and_nothing_is_copied() -> None:
    pool = torch.randn(2, 6, 4, 8)
    (blocks,) = cut((3, 3), 2)
    assert blocks.strips is None
    assert blocks.tokens(pool).shape == (4, 12, 8)
    assert blocks.tokens(pool).data_ptr() == pool.data_ptr()


def test_what_lies_across_two_strips_is_a_sixth_of_the_shortest_at_most() -> None:
    regions = (60, 81, 73)
    whole, *copied = cut(regions, 3)
    assert whole.slots == 10
    again = sum(blocks.count * blocks.slots for blocks in copied if blocks.picked is not None)
    assert again <= 3 * len(regions) * whole.slots
