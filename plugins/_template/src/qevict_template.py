"""A scorer in a distribution of its own: a class, and a hook that offers it."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.registry import hookimpl


@attrs.frozen
class KeyNorm(Scorer):
    """Keeps windows whose keys are short: they tend to draw the most attention.

    After the L2-norm strategy of arXiv 2406.11430. Ranked windows are whole, so a sum over tokens orders them
    as a mean would. Bytes: 4 per window and lane.
    """

    name: ClassVar[str] = "key_norm"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.KEYS})

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        return {"norm": torch.zeros(lanes, windows, dtype=torch.float32, device=device)}

    def update(self, state: State, observation: Observation) -> State:
        if observation.keys is None:
            raise TypeError("KeyNorm declares Need.KEYS, but the observation has no keys")
        norms = observation.keys.float().norm(dim=-1).mean(dim=1)  # over the KV heads: [lanes, tokens]
        return {"norm": state["norm"] + observation.sum_by_window(norms)}

    def rank(self, state: State, windows: Windows) -> Mapping[str, Tensor]:
        return {IMPORTANCE: -state["norm"]}


@hookimpl
def qevict_scorers() -> Iterable[type[Scorer]]:
    """Offer the scorers of this distribution."""
    return [KeyNorm]
