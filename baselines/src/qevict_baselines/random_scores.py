"""Chance, the baseline below which no method should fall."""

from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.shapes import Scores

_BITS = 31
_MIX = 0x45D9F3B


@attrs.frozen
class RandomScores(Scorer):
    """Ranks windows by chance: a number between 0 and 1 that follows from the window's position and the seed alone.

    So a run can be repeated, and a row is alone what it is in a batch. The price is that all rows, heads and layers
    keep the same positions. Needs nothing and remembers nothing: 0 bytes.

    Args:
        seed: another seed, other numbers.
    """

    name: ClassVar[str] = "random"
    needs: ClassVar[frozenset[Need]] = frozenset()
    seed: int = 0

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """No state."""
        return {}

    def update(self, state: State, observation: Observation) -> State:
        """Nothing to learn."""
        return state

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """Position and seed, mixed; 24 bits of the result, which fp32 holds exactly."""
        mixed = _mixed(_mixed(windows.positions.long() + 1) + self.seed % 2**_BITS)
        return {IMPORTANCE: (mixed >> (_BITS - 24)).float() / 2**24}


def _mixed(number: Tensor) -> Tensor:
    """A bijection of 31-bit numbers that no bit leaves alone (a multiply-xorshift hash)."""
    for _ in range(2):
        number = number & (2**_BITS - 1)
        number = ((number >> 16) ^ number) * _MIX
    number = number & (2**_BITS - 1)
    return (number >> 16) ^ number
