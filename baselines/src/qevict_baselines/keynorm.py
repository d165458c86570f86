"""A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (arXiv 2406.11430)."""

from typing import ClassVar

import attrs
import torch

from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.shapes import Scores


@attrs.frozen
class ShortKeys(Scorer):
    """Keeps windows whose keys are short: they tend to draw the most attention.

    The L2-norm strategy (arXiv 2406.11430), section 3: minus the norm of the key. Faithful: windows of one token, lanes
    of one KV head. RoPE turns and does not stretch, so the domain is of no matter. The paper leaves the first two
    layers whole, which is a matter of budgets. Different: a longer window, and a lane of several KV heads, count by the
    sum over tokens and the mean over heads.

    Bytes: 4 per window and lane.
    """

    name: ClassVar[str] = "short_keys"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.KEYS})

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing seen."""
        return {"norm": torch.zeros(lanes, windows, dtype=torch.float32, device=device)}

    def update(self, state: State, observation: Observation) -> State:
        """Add the norms of the new keys."""
        assert observation.keys is not None
        norms = observation.keys.float().norm(dim=-1).mean(dim=1)
        return {"norm": state["norm"] + observation.sum_by_window(norms)}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """The shorter the better."""
        return {IMPORTANCE: -state["norm"]}
