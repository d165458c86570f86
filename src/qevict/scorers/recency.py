"""Later is better: the score of sinks + recent."""

from typing import ClassVar

import attrs
import torch

from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.shapes import Scores


@attrs.frozen
class Recency(Scorer):
    """Ranks windows by position, so that a budget keeps the sinks and as much of the recent past as fits.

    The rule of StreamingLLM (arXiv 2309.17453) at original positions. Needs nothing and remembers nothing: 0 bytes.
    """

    name: ClassVar[str] = "recency"
    needs: ClassVar[frozenset[Need]] = frozenset()
    keeps_suffix: ClassVar[bool] = True

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """No state."""
        return {}

    def update(self, state: State, observation: Observation) -> State:
        """Nothing to learn."""
        return state

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """The position, exact in fp32 up to 2**24 tokens."""
        return {IMPORTANCE: windows.positions.float()}
