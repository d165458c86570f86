"""The laws of a store and of the pools that it opens."""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import attrs
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from qevict.contracts.store import Pool, Store
from qevict.contracts.values import ArraySpec, Codes, Layout
from qevict.testing.contract import RegisteredContract, declares, law
from qevict.testing.footprint import reachable_bytes
from qevict.testing.values import copied, random_bits, require, same_bits, same_values

LAYOUT: Layout = {
    "codes": ArraySpec((6,), torch.uint8),
    "scale": ArraySpec((3,), torch.float16),
    "block": ArraySpec((2, 4), torch.bfloat16),
    "exact": ArraySpec((1,), torch.float32),
}
"""A block of every dtype that the built-in tiers store."""

BLOCK_BYTES = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in LAYOUT.values())


@attrs.frozen
class Step:
    """One thing that happens to a pool.

    Attributes:
        verb: what is done.
        slots: to or with which slots, modulo the capacity; a slot counts once.
        room: slots more than are kept, where the pool is repacked.
    """

    verb: Literal["write", "repack"]
    slots: tuple[int, ...]
    room: int


@attrs.frozen
class StoreCase:
    """What happens to a new pool.

    Attributes:
        heads: KV heads.
        capacity: slots at the beginning.
        steps: what happens, in order.
        seed: decides what is written.
    """

    heads: int
    capacity: int
    steps: tuple[Step, ...]
    seed: int

    def blocks(self, count: int, number: int) -> Codes:
        """Blocks with every bit pattern, NaN included; others for another number."""
        seed = 1000 * self.seed + 10 * number
        return {
            name: random_bits(seed + index, self.heads, count, *spec.shape, dtype=spec.dtype)
            for index, (name, spec) in enumerate(LAYOUT.items())
        }


STORE_CASES = st.builds(
    StoreCase,
    heads=st.integers(1, 2),
    capacity=st.integers(1, 5),
    steps=st.lists(
        st.builds(
            Step,
            verb=st.sampled_from(["write", "repack"]),
            slots=st.lists(st.integers(0, 5), max_size=5).map(tuple),
            room=st.integers(1, 3),
        ),
        max_size=5,
    ).map(tuple),
    seed=st.integers(0, 100),
)


class StoreContract(RegisteredContract[Store, StoreCase]):
    """The laws of a store and its pools. One line makes them tests of yours.

    Example:
        ```python
        from qevict.stores.memory import DeviceMemory
        from qevict.testing import StoreContract


        class TestDeviceMemory(StoreContract):
            part = DeviceMemory()
        ```
    """

    kind: ClassVar[type] = Store

    def cases(self) -> SearchStrategy[StoreCase]:
        """Any history of writes and repacks of a small pool."""
        return STORE_CASES

    @law("read(slots) returns bit for bit what the last write to these slots stored; repack keeps blocks in order.")
    def test_any_history_reads_back_bit_for_bit(self, case: StoreCase) -> None:
        """Against a dictionary of what each slot should hold."""
        pool, expected = self._open(case), dict[int, Codes]()
        for number, step in enumerate(case.steps):
            slots = _slots(step, pool.capacity)
            if step.verb == "write":
                written = case.blocks(len(slots), number)
                self._write(pool, slots, written)
                expected |= {slot: _block(written, index) for index, slot in enumerate(slots)}
            else:
                stay = [slot for slot in slots if slot in expected]
                self._repack(pool, stay, len(stay) + step.room)
                expected = {new: expected[old] for new, old in enumerate(stay)}
            for slot, block in expected.items():
                found = self._read(pool, [slot])
                require(same_values(found, block), f"after {step}, slot {slot} reads {_differs(found, block)}")

    @law("read(slots) follows the order asked for, and may be asked for a slot twice.")
    def test_reading_follows_the_order_asked_for(self, case: StoreCase) -> None:
        pool, written = self._full(case)
        order = [*reversed(range(case.capacity)), 0]
        found, wanted = self._read(pool, order), {name: array[:, order] for name, array in written.items()}
        require(same_values(found, wanted), f"slots {order} read {_differs(found, wanted)}")
        none = self._read(pool, [])
        for name, spec in LAYOUT.items():
            shape = tuple(none[name].shape)
            require(shape == (case.heads, 0, *spec.shape), f"no slots read as {shape} of {name!r}")

    @law("repack keeps the blocks of the given slots, in that order, in slots 0 ... len - 1.")
    def test_repacking_keeps_the_given_blocks_in_order(self, case: StoreCase) -> None:
        """Turned at the same capacity, then some kept in a pool of another size, then these turned as well."""
        pool, held = self._full(case)
        some = [*reversed(range(case.capacity))][: 1 + case.seed % case.capacity]
        room = len(some) + case.seed % 3
        for stay, capacity in ((_turned(case.capacity), case.capacity), (some, room), (_turned(len(some)), room)):
            before = pool.capacity
            self._repack(pool, stay, capacity)
            require(pool.capacity == capacity, f"repacked to {capacity} slots, the capacity is {pool.capacity}")
            held = {name: each[:, stay] for name, each in held.items()}
            found = self._read(pool, [*range(len(stay))])
            require(same_values(found, held), f"slots {stay} of {before} were kept: {_differs(found, held)}")

    @law("repack puts each block into the slot that is named for it, and no others.")
    def test_repacking_puts_blocks_where_they_are_told(self, case: StoreCase) -> None:
        """Spread over a larger pool, with gaps and out of order; where the pool is attended, the gaps hold zeros."""
        pool, held = self._full(case)
        stay = [*range(case.capacity)][case.seed % 2 :]
        into = [2 * slot + 1 for slot in reversed(range(len(stay)))]
        capacity = 2 * len(stay) + 2
        pool.repack(self._indices(stay), self._indices(into), capacity)
        found, wanted = self._read(pool, into), {name: each[:, stay] for name, each in held.items()}
        require(same_values(found, wanted), f"slots {stay} went into {into}: {_differs(found, wanted)}")
        if self.part.attended:
            gaps = self._read(pool, [slot for slot in range(capacity) if slot not in into])
            require(all(same_bits(each, torch.zeros_like(each)) for each in gaps.values()), "the gaps are not 0")

    @law("repack copies a slot as often as it is given.")
    def test_repacking_copies_a_slot_as_often_as_it_is_given(self, case: StoreCase) -> None:
        """As beams copy a row: the first slot three times, the others twice."""
        pool, held = self._full(case)
        stay = [0, *range(case.capacity), *range(case.capacity)]
        self._repack(pool, stay, len(stay) + case.seed % 2)
        found, wanted = self._read(pool, [*range(len(stay))]), {name: each[:, stay] for name, each in held.items()}
        require(same_values(found, wanted), f"slots {stay} were kept: {_differs(found, wanted)}")

    @law("nbytes is the bytes of everything allocated, free slots included.")
    def test_every_byte_allocated_is_counted(self, case: StoreCase) -> None:
        """The storages that the pool's attributes lead to; on a disk, at least what its slots take."""
        pool = self._open(case)
        for number, step in enumerate((None, *case.steps)):
            if step is not None and step.verb == "write":
                slots = _slots(step, pool.capacity)
                self._write(pool, slots, case.blocks(len(slots), number))
            elif step is not None:
                self._repack(pool, [], step.room)
            allocated = reachable_bytes(pool)
            slots_bytes = pool.capacity * case.heads * BLOCK_BYTES
            told = f"nbytes is {pool.nbytes}, after {step}"
            require(pool.nbytes >= slots_bytes, f"{told}; {pool.capacity} slots take {slots_bytes} bytes")
            require(pool.nbytes >= allocated, f"{told}; storages of {allocated} bytes are reachable from the pool")
            exact = pool.nbytes == allocated or not self.part.attended
            require(exact, f"{told}; storages of {allocated} bytes are reachable from the pool")

    @law("A pool keeps copies: neither what was written nor what was read is tied to it.")
    def test_a_pool_shares_nothing_with_its_callers(self, case: StoreCase) -> None:
        pool, everywhere = self._open(case), [*range(case.capacity)]
        written = case.blocks(case.capacity, 0)
        given = {name: array.to(self.device, copy=True) for name, array in written.items()}
        pool.write(self._indices(everywhere), given)
        _wipe(given)
        require(same_values(self._read(pool, everywhere), written), "changing what was written changed the pool")
        _wipe(pool.read(self._indices(everywhere)))
        require(same_values(self._read(pool, everywhere), written), "changing what was read changed the pool")

    @law("Writing leaves the blocks it is given alone.")
    def test_writing_leaves_its_arguments_alone(self, case: StoreCase) -> None:
        pool, blocks = self._open(case), {n: a.to(self.device) for n, a in case.blocks(case.capacity, 0).items()}
        before = copied(blocks)
        pool.write(self._indices([*range(case.capacity)]), blocks)
        require(same_values(blocks, before), "write changed the blocks that it was given")

    @law("Every pool that a store opens is a pool of its own.")
    def test_pools_of_one_store_are_apart(self, case: StoreCase) -> None:
        pool, written = self._full(case)
        other, _ = self._full(attrs.evolve(case, seed=case.seed + 1))
        everywhere = [*range(case.capacity)]
        require(same_values(self._read(pool, everywhere), written), "writing to another pool changed this one")
        require(other.capacity == case.capacity, "another pool has another capacity than it was given")

    @law("lend gives the pool's own arrays [heads, slots, ...], without a copy.", given_that=declares("attended"))
    def test_what_is_lent_is_the_pool_itself(self, case: StoreCase) -> None:
        pool = self._open(case)
        lent, written = pool.lend(), case.blocks(case.capacity, 0)
        self._write(pool, [*range(case.capacity)], written)
        require(lent.keys() == LAYOUT.keys(), f"it lends {sorted(lent)}, the layout names {sorted(LAYOUT)}")
        for name, array in written.items():
            require(lent[name].dtype == array.dtype, f"{name!r} is lent as {lent[name].dtype}, not {array.dtype}")
            require(lent[name].shape == array.shape, f"{name!r} is lent as {tuple(lent[name].shape)}")
            require(same_bits(lent[name], array), f"what was written after lending does not show in {name!r}")

    @law("What is lent is what the pool holds, after every write and repack.", given_that=declares("attended"))
    def test_what_is_lent_follows_the_pool(self, case: StoreCase) -> None:
        """Lent anew each time, as for each forward."""
        pool = self._open(case)
        for number, step in enumerate((None, *case.steps)):
            if step is not None:
                slots = _slots(step, pool.capacity)
                if step.verb == "write":
                    self._write(pool, slots, case.blocks(len(slots), number))
                else:
                    self._repack(pool, slots, len(slots) + step.room)
            lent = {name: array.cpu() for name, array in pool.lend().items()}
            held = self._read(pool, [*range(pool.capacity)])
            finding = f"after {step}, what is lent and what is read differ: {_differs(lent, held)}"
            require(same_values(lent, held), finding)

    @law("In an attended pool, slots that nothing was written to hold zeros.", given_that=declares("attended"))
    def test_slots_never_written_read_as_zeros(self, case: StoreCase) -> None:
        """Attention masks them, but what it multiplies by 0 must be finite."""
        pool, _ = self._full(case)
        for capacity in (case.capacity, case.capacity + 3):
            self._repack(pool, [case.capacity - 1], capacity)
            for name, array in self._read(pool, [*range(1, capacity)]).items():
                require(same_bits(array, torch.zeros_like(array)), f"{name!r} of a fresh slot is not 0")
            self._write(pool, [*range(capacity)], case.blocks(capacity, 1))

    def _open(self, case: StoreCase) -> Pool:
        pool = self.part.open(LAYOUT, case.heads, self.device)
        self._repack(pool, [], case.capacity)
        require(pool.capacity == case.capacity, f"repacked to {case.capacity} slots, the capacity is {pool.capacity}")
        return pool

    def _full(self, case: StoreCase) -> tuple[Pool, Codes]:
        pool, written = self._open(case), case.blocks(case.capacity, 0)
        self._write(pool, [*range(case.capacity)], written)
        return pool, written

    def _repack(self, pool: Pool, slots: list[int], capacity: int) -> None:
        """Keep some blocks, in order, in the first slots."""
        pool.repack(self._indices(slots), self._indices([*range(len(slots))]), capacity)

    def _write(self, pool: Pool, slots: list[int], codes: Codes) -> None:
        pool.write(self._indices(slots), {name: array.to(self.device, copy=True) for name, array in codes.items()})

    def _read(self, pool: Pool, slots: list[int]) -> Codes:
        return {name: array.cpu() for name, array in copied(pool.read(self._indices(slots))).items()}

    def _indices(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self.device)


def _slots(step: Step, capacity: int) -> list[int]:
    return list(dict.fromkeys(slot % capacity for slot in step.slots))


def _turned(count: int) -> list[int]:
    """All slots, each one further; not its own inverse beyond two."""
    return [*range(1, count), 0]


def _block(codes: Codes, index: int) -> Codes:
    return {name: array[:, index : index + 1].clone() for name, array in codes.items()}


def _differs(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    if found.keys() != wanted.keys():
        return f"the arrays {sorted(found)}"
    return f"other bits in {[name for name in wanted if not same_bits(found[name], wanted[name])]}"


def _wipe(codes: Codes) -> None:
    for array in codes.values():
        array.zero_()
