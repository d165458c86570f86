"""The store: where a tier's bytes live."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from qevict.contracts.values import Codes, Layout


class Pool(ABC):
    """Slot-addressed blocks of one tier of one layer, for all lanes. Mutable: the engine's mover is its only user.

    Which slots are in use is written in the engine's table of records and nowhere else.

    Laws:
        * ``read(slots)`` returns bit for bit what the last ``write`` to these slots stored.
        * ``nbytes`` is the bytes of everything allocated, free slots included.
        * A pool keeps copies: neither what was written nor what was read is tied to it.
        * In an attended pool, slots that nothing was written to hold zeros: attention masks them, but reads them.
        * ``repack`` keeps the blocks of the given slots, each in the slot that is named for it, and no others. A slot
          may be given more than once, and is then copied as often.
    """

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Number of slots."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated."""

    @abstractmethod
    def write(self, slots: Int[Tensor, " windows"], codes: Codes) -> None:
        """Store blocks."""

    @abstractmethod
    def read(self, slots: Int[Tensor, " windows"]) -> Codes:
        """Copy blocks out."""

    @abstractmethod
    def lend(self) -> Codes:
        """The pool's own arrays ``[heads, slots, ...]``, without a copy; for attention over an attended store.

        What lies inside a block is contiguous.
        """

    @abstractmethod
    def repack(self, slots: Int[Tensor, " windows"], into: Int[Tensor, " windows"], capacity: int) -> None:
        """Lay the pool out anew: ``capacity`` slots, with the block of each of ``slots`` in the slot ``into`` names."""


class Store(ABC):
    """Says where bytes live. A frozen value; encoding and placement are separate axes.

    Attributes:
        attended: attention reads the pool in place (else a tier on it is offloaded).
    """

    name: ClassVar[str]
    attended: ClassVar[bool]

    @abstractmethod
    def open(self, layout: Layout, heads: int, device: torch.device) -> Pool:
        """An empty pool for blocks of that layout."""
