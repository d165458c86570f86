"""Chance, the baseline below which no method should fall."""

from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.budget import Budget
from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, RouteAt, Windows
from qevict.errors import PolicyError
from qevict.policy import Policy
from qevict.routers.greedy import GreedyTiers
from qevict.shapes import Scores
from qevict_baselines.composing import evicting

_BITS = 31
_MIX = 0x45D9F3B


def _whole(_instance: object, attribute: "attrs.Attribute[int]", value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{attribute.name} is a whole number, got {value!r}"
        raise PolicyError(msg)


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
    seed: int = attrs.field(default=0, validator=_whole)

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


def random_eviction(
    budget: Budget | str, *, seed: int = 0, route_at: RouteAt = "prompt", dtype: torch.dtype | None = None
) -> Policy:
    """Tokens by chance: see :class:`RandomScores`.

    Bytes: full precision for each kept token, and 12 of bookkeeping per token of a row.

    Args:
        budget: bytes per row.
        seed: another seed, other tokens.
        route_at: "prompt" (default), or "period" to hold the budget while decoding.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    return evicting(budget, RandomScores(seed), GreedyTiers(), granularity="row", route_at=route_at, dtype=dtype)
