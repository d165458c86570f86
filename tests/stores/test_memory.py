"""Device memory: what is written is read, and every byte allocated is counted."""

import pytest
import torch

from qevict.contracts.store import Pool
from qevict.contracts.values import ArraySpec, Layout, layout_bytes
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
    none = torch.zeros(0, dtype=torch.int64)
    pool.repack(none, none, capacity)
    return pool


def allocated(pool: Pool) -> int:
    storages = {array.untyped_storage().data_ptr(): array.untyped_storage().nbytes() for array in pool.lend().values()}
    return sum(storages.values())


def test_an_empty_pool_holds_nothing() -> None:
    pool = DeviceMemory().open(LAYOUT, HEADS, torch.device("cpu"))
    assert pool.capacity == 0
    assert pool.nbytes == allocated(pool) == 0
    assert pool.read(torch.zeros(0, dtype=torch.int64))["scale"].shape == (HEADS, 0, 3)


def test_slots_are_whole_numbers_of_any_width() -> None:
    pool, blocks = open_pool(3), {name: torch.ones(HEADS, 1, *spec.shape) for name, spec in LAYOUT.items()}
    one = torch.tensor([1], dtype=torch.int32)
    pool.write(one, blocks)
    pool.repack(one, torch.tensor([2], dtype=torch.int32), 4)
    assert pool.lend()["exact"][0, :, 0].tolist() == [0, 0, 1, 0]
    assert torch.equal(pool.read(torch.tensor([2], dtype=torch.int32))["scale"], blocks["scale"].half())


@pytest.mark.parametrize("capacity", [0, 1, 7])
def test_bytes_are_those_of_the_storages_free_slots_included(capacity: int) -> None:
    pool = open_pool(capacity)
    assert pool.capacity == capacity
    assert pool.nbytes == allocated(pool) == capacity * HEADS * layout_bytes(LAYOUT)
    assert layout_bytes(LAYOUT) == 6 + 6 + 16 + 4
