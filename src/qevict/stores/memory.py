"""Bytes on the device that attention runs on."""

from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.store import Pool, Store
from qevict.contracts.values import Codes, Layout


class MemoryPool(Pool):
    """One tensor per array, ``[heads, slots, ...]``: the blocks of a KV head lie together, keys apart from values."""

    def __init__(self, layout: Layout, heads: int, device: torch.device) -> None:
        self._arrays = {
            name: torch.empty(heads, 0, *spec.shape, dtype=spec.dtype, device=device) for name, spec in layout.items()
        }

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return next(iter(self._arrays.values())).shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(array.nbytes for array in self._arrays.values())

    def write(self, slots: Tensor, codes: Codes) -> None:
        """Store blocks, in place."""
        for name, array in self._arrays.items():
            array.index_copy_(1, slots.long(), codes[name].to(array.dtype))

    def read(self, slots: Tensor) -> Codes:
        """Copy blocks out."""
        return {name: array.index_select(1, slots) for name, array in self._arrays.items()}

    def lend(self) -> Codes:
        """The arrays themselves."""
        return self._arrays

    def repack(self, slots: Tensor, into: Tensor, capacity: int) -> None:
        """Allocate anew and copy what stays; unused slots hold zeros, so that masked reads stay finite."""
        moved, slots, into = slots.shape[0], slots.long(), into.long()
        unused = torch.ones(capacity, dtype=torch.bool, device=slots.device).index_fill_(0, into, value=False)
        blank = torch.nonzero_static(unused, size=capacity - moved)[:, 0]
        origin = slots.new_zeros(capacity).index_copy_(0, into, slots)
        for name, array in self._arrays.items():
            if moved:  # whole blocks are gathered many times faster than they are scattered
                self._arrays[name] = array.index_select(1, origin).index_fill_(1, blank, 0)
            else:
                self._arrays[name] = array.new_zeros(array.shape[0], capacity, *array.shape[2:])


@attrs.frozen
class DeviceMemory(Store):
    """Keeps blocks in the memory of the model's device, where attention reads them in place."""

    name: ClassVar[str] = "device"
    attended: ClassVar[bool] = True

    def open(self, layout: Layout, heads: int, device: torch.device) -> Pool:
        """An empty pool."""
        return MemoryPool(layout, heads, device)
