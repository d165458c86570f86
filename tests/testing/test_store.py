"""Each law of stores is broken by some store, and the kit says so."""

from typing import ClassVar

import attrs
import pytest
import torch
from tests.breaking import Break, breaks, laws_of, passes, report
from torch import Tensor

from qevict.contracts.store import Pool
from qevict.contracts.values import Codes, Layout
from qevict.stores.memory import DeviceMemory, MemoryPool
from qevict.testing import StoreContract


@attrs.frozen
class Broken(DeviceMemory):
    """Opens pools of a broken class."""

    pool: type[MemoryPool] = MemoryPool

    def open(self, layout: Layout, heads: int, device: torch.device) -> Pool:
        return self.pool(layout, heads, device)


class ReadsRounded(MemoryPool):
    def read(self, slots: Tensor) -> Codes:
        return {
            name: array if array.dtype != torch.float32 else array.bfloat16().float()
            for name, array in super().read(slots).items()
        }


class ReadsSorted(MemoryPool):
    def read(self, slots: Tensor) -> Codes:
        return super().read(slots.sort().values)


class RepacksReversed(MemoryPool):
    def repack(self, slots: Tensor, into: Tensor, capacity: int) -> None:
        super().repack(slots.flip(0), into, capacity)


class CountsWhatIsUsed(MemoryPool):
    @property
    def nbytes(self) -> int:
        return super().nbytes // 2


class HidesScratch(MemoryPool):
    def write(self, slots: Tensor, codes: Codes) -> None:
        super().write(slots, codes)
        self.scratch = torch.zeros(100)


class KeepsReferences(MemoryPool):
    def write(self, slots: Tensor, codes: Codes) -> None:
        if slots.tolist() == list(range(self.capacity)):
            self._arrays = dict(codes)
        else:
            super().write(slots, codes)


class ReadsViews(MemoryPool):
    def read(self, slots: Tensor) -> Codes:
        if slots.tolist() == list(range(self.capacity)):
            return self.lend()
        return super().read(slots)


class ClearsWhatItIsGiven(MemoryPool):
    def write(self, slots: Tensor, codes: Codes) -> None:
        super().write(slots, codes)
        for array in codes.values():
            array.zero_()


class OneForAll(MemoryPool):
    shared: ClassVar[dict[str, Tensor]] = {}

    def __init__(self, layout: Layout, heads: int, device: torch.device) -> None:
        super().__init__(layout, heads, device)
        self._arrays = self.shared
        self.shared.update(MemoryPool(layout, heads, device)._arrays)


class LendsCopies(MemoryPool):
    def lend(self) -> Codes:
        return {name: array.clone() for name, array in self._arrays.items()}


class LendsTheFirst(MemoryPool):
    """For ever what it lent at the first call."""

    first: Codes | None = None

    def lend(self) -> Codes:
        self.first = self.first or dict(self._arrays)
        return self.first


class SkipsEqualSizes(MemoryPool):
    """Takes a repack for done where neither capacity nor number changes, whatever the order."""

    def repack(self, slots: Tensor, into: Tensor, capacity: int) -> None:
        if not capacity == self.capacity == slots.shape[0]:
            super().repack(slots, into, capacity)


class SkipsEqualCapacities(MemoryPool):
    """Likewise beside free slots."""

    used = -1

    def repack(self, slots: Tensor, into: Tensor, capacity: int) -> None:
        if (capacity, slots.shape[0]) != (self.capacity, self.used):
            super().repack(slots, into, capacity)
        self.used = slots.shape[0]


class RepacksInverse(MemoryPool):
    def repack(self, slots: Tensor, into: Tensor, capacity: int) -> None:
        whole = slots.shape[0] == self.capacity
        super().repack(slots.argsort() if whole else slots, into, capacity)


class RepacksIntoTheFirst(MemoryPool):
    """Wherever the blocks shall go."""

    def repack(self, slots: Tensor, into: Tensor, capacity: int) -> None:
        super().repack(slots, torch.arange(into.shape[0]), capacity)


class RepacksOnce(MemoryPool):
    """Gives a slot to the first who asks for it."""

    def repack(self, slots: Tensor, into: Tensor, capacity: int) -> None:
        first = [index for index, slot in enumerate(slots.tolist()) if slot not in slots.tolist()[:index]]
        super().repack(slots[first], into[first], capacity)


class LeavesJunk(MemoryPool):
    def repack(self, slots: Tensor, into: Tensor, capacity: int) -> None:
        super().repack(slots, into, capacity)
        for array in self._arrays.values():
            array[:, slots.shape[0] :] = 1


BREAKS = (
    Break("test_any_history_reads_back_bit_for_bit", Broken(ReadsRounded), "reads other bits in ['exact']"),
    Break("test_reading_follows_the_order_asked_for", Broken(ReadsSorted), "slots [1, 0, 0] read other bits"),
    Break("test_repacking_keeps_the_given_blocks_in_order", Broken(RepacksReversed), "were kept: other bits"),
    Break("test_repacking_keeps_the_given_blocks_in_order", Broken(SkipsEqualSizes), "were kept: other bits"),
    Break("test_repacking_keeps_the_given_blocks_in_order", Broken(SkipsEqualCapacities), "were kept: other bits"),
    Break("test_repacking_keeps_the_given_blocks_in_order", Broken(RepacksInverse), "slots [1, 2, 0] of 3 were kept"),
    Break("test_repacking_puts_blocks_where_they_are_told", Broken(RepacksIntoTheFirst), "other bits"),
    Break("test_repacking_copies_a_slot_as_often_as_it_is_given", Broken(RepacksOnce), "slots [0, 0, 0] were kept"),
    Break("test_every_byte_allocated_is_counted", Broken(CountsWhatIsUsed), "nbytes is 16"),
    Break("test_every_byte_allocated_is_counted", Broken(HidesScratch), "are reachable from the pool"),
    Break("test_a_pool_shares_nothing_with_its_callers", Broken(KeepsReferences), "changing what was written"),
    Break("test_a_pool_shares_nothing_with_its_callers", Broken(ReadsViews), "changing what was read"),
    Break("test_writing_leaves_its_arguments_alone", Broken(ClearsWhatItIsGiven), "write changed the blocks"),
    Break("test_pools_of_one_store_are_apart", Broken(OneForAll), "writing to another pool changed this one"),
    Break("test_what_is_lent_is_the_pool_itself", Broken(LendsCopies), "does not show"),
    Break("test_what_is_lent_follows_the_pool", Broken(LendsTheFirst), "what is lent and what is read differ"),
    Break("test_slots_never_written_read_as_zeros", Broken(LeavesJunk), "of a fresh slot is not 0"),
)


@breaks(*BREAKS)
def test_a_broken_store_is_told_which_law_it_breaks(broken: Break) -> None:
    report(StoreContract, broken)


def test_every_law_is_broken_by_some_store() -> None:
    assert {each.law for each in BREAKS} == laws_of(StoreContract)


@attrs.frozen
class Offloaded(DeviceMemory):
    attended: ClassVar[bool] = False


def test_who_is_not_attended_need_not_lend() -> None:
    lent = ("test_what_is_lent_is_the_pool_itself", "test_what_is_lent_follows_the_pool")
    for law in (*lent, "test_slots_never_written_read_as_zeros"):
        with pytest.raises(pytest.skip.Exception, match=r"Offloaded\(\) declares attended = False"):
            passes(StoreContract, Offloaded(), law)
    passes(StoreContract, Offloaded(), "test_any_history_reads_back_bit_for_bit")
