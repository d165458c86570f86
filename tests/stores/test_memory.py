"""Device memory: what is written is read, and every byte allocated is counted."""

import random

import pytest
import torch
from torch import Tensor

from qevict.contracts.store import Pool
from qevict.contracts.values import ArraySpec, Codes, Layout, layout_bytes
from qevict.stores.memory import DeviceMemory

HEADS = 2
LAYOUT: Layout = {
    "codes": ArraySpec((6,), torch.uint8),
    "scale": ArraySpec((3,), torch.float16),
    "block": ArraySpec((2, 4), torch.bfloat16),
    "exact": ArraySpec((1,), torch.float32),
}


def open_pool(capacity: int = 0) -> Pool:
    pool = DeviceMemory().open(LAYOUT, HEADS, torch.device("cpu"))
    pool.repack(torch.zeros(0, dtype=torch.int64), capacity)
    return pool


def blocks(count: int, seed: int) -> Codes:
    """Random bits of each array's dtype: NaN and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(
            0, 256, (HEADS, count, *spec.shape[:-1], spec.shape[-1] * spec.dtype.itemsize), generator=generator
        )
        .to(torch.uint8)
        .view(spec.dtype)
        for name, spec in LAYOUT.items()
    }


def bits(array: Tensor) -> bytes:
    return bytes(array.contiguous().view(torch.uint8).flatten().tolist())


def same(left: Codes, right: Codes) -> bool:
    return left.keys() == right.keys() and all(bits(left[name]) == bits(right[name]) for name in left)


def allocated(pool: Pool) -> int:
    storages = {array.untyped_storage().data_ptr(): array.untyped_storage().nbytes() for array in pool.lend().values()}
    return sum(storages.values())


def test_an_empty_pool_holds_nothing() -> None:
    pool = DeviceMemory().open(LAYOUT, HEADS, torch.device("cpu"))
    assert pool.capacity == 0
    assert pool.nbytes == allocated(pool) == 0
    assert pool.read(torch.zeros(0, dtype=torch.int64))["scale"].shape == (HEADS, 0, 3)


@pytest.mark.parametrize("capacity", [0, 1, 7])
def test_bytes_are_those_of_the_storages_free_slots_included(capacity: int) -> None:
    pool = open_pool(capacity)
    assert pool.capacity == capacity
    assert pool.nbytes == allocated(pool) == capacity * HEADS * layout_bytes(LAYOUT)
    assert layout_bytes(LAYOUT) == 6 + 6 + 16 + 4


def test_any_history_reads_back_bit_for_bit() -> None:
    """Random writes, rewrites and repacks against a dictionary of what each slot should hold."""
    chance, pool = random.Random(0), open_pool(4)
    expected: dict[int, Codes] = {}
    for step in range(120):
        if chance.random() < 0.7:
            slots = chance.sample(range(pool.capacity), chance.randint(0, pool.capacity))
            written = blocks(len(slots), step)
            pool.write(torch.tensor(slots, dtype=torch.int64), written)
            for index, slot in enumerate(slots):
                expected[slot] = {name: array[:, index : index + 1].clone() for name, array in written.items()}
        else:
            stay = chance.sample(sorted(expected), chance.randint(0, len(expected)))
            pool.repack(torch.tensor(stay, dtype=torch.int64), len(stay) + chance.randint(1, 4))
            expected = {new: expected[old] for new, old in enumerate(stay)}
        assert pool.nbytes == allocated(pool) == pool.capacity * HEADS * layout_bytes(LAYOUT)
        for slot, block in expected.items():
            assert same(pool.read(torch.tensor([slot])), block)


def test_reading_follows_the_order_asked_for() -> None:
    pool, written = open_pool(3), blocks(3, 0)
    pool.write(torch.tensor([2, 0, 1]), written)
    assert same(pool.read(torch.tensor([2, 0, 1])), written)
    twice = pool.read(torch.tensor([0, 0]))
    assert same(twice, {name: array[:, [1, 1]] for name, array in written.items()})


def test_what_is_read_is_a_copy() -> None:
    pool, written = open_pool(2), blocks(2, 0)
    slots = torch.tensor([0, 1])
    pool.write(slots, written)
    for array in pool.read(slots).values():
        array.zero_()
    assert same(pool.read(slots), written)
    before = {name: array.clone() for name, array in written.items()}
    pool.write(slots, blocks(2, 1))
    assert same(written, before)


def test_what_is_lent_is_the_pool_itself() -> None:
    """No copy: what is written later shows, and the storages are those that the bytes count."""
    pool = open_pool(2)
    lent = pool.lend()
    assert {name: array.shape[:2] for name, array in lent.items()} == dict.fromkeys(LAYOUT, (HEADS, 2))
    written = blocks(2, 3)
    pool.write(torch.tensor([0, 1]), written)
    assert same(lent, written)
    assert [array.data_ptr() for array in pool.lend().values()] == [array.data_ptr() for array in lent.values()]
    assert all(array.dtype == LAYOUT[name].dtype for name, array in lent.items())


def test_repacking_moves_the_kept_blocks_to_the_front_and_frees_the_rest() -> None:
    pool, written = open_pool(8), blocks(8, 0)
    pool.write(torch.arange(8), written)
    pool.repack(torch.tensor([6, 1, 3]), 3)
    assert pool.capacity == 3
    assert pool.nbytes == allocated(pool) == 3 * HEADS * layout_bytes(LAYOUT)
    assert same(pool.read(torch.arange(3)), {name: array[:, [6, 1, 3]] for name, array in written.items()})


def test_unused_slots_read_as_zeros_after_repacking() -> None:
    """Masked columns point at any slot; what they read must be finite."""
    pool = open_pool(2)
    pool.write(torch.arange(2), blocks(2, 0))
    pool.repack(torch.tensor([1]), 4)
    for array in pool.read(torch.tensor([1, 2, 3])).values():
        assert not any(bits(array))


def test_pools_of_one_store_are_apart_and_a_store_is_a_value() -> None:
    first, second = open_pool(1), open_pool(1)
    first.write(torch.tensor([0]), blocks(1, 0))
    assert not any(bits(second.read(torch.tensor([0]))["codes"]))
    assert DeviceMemory.attended
    assert DeviceMemory() == DeviceMemory()
    assert hash(DeviceMemory()) == hash(DeviceMemory())
