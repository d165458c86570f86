"""A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (arXiv 2406.11430)."""

from typing import ClassVar

import attrs
import torch

from qevict.contracts.budget import Budget
from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, RouteAt, Windows
from qevict.policy import Policy
from qevict.routers.greedy import GreedyTiers
from qevict.shapes import Scores
from qevict_baselines.composing import evicting


@attrs.frozen
class ShortKeys(Scorer):
    """Keeps windows whose keys are short: they tend to draw the most attention.

    The L2-norm strategy (arXiv 2406.11430): minus the norm of the key. Faithful: windows of one token, lanes
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


def key_norms(budget: Budget | str, *, route_at: RouteAt = "prompt", dtype: torch.dtype | None = None) -> Policy:
    """The shortest keys, head by head; no attention is looked at.

    Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (arXiv 2406.11430):
    see :class:`ShortKeys`. The paper leaves the first two layers whole; here all layers are alike.

    Bytes: full precision for each kept token, and 16 of bookkeeping per token and KV head.

    Args:
        budget: bytes per row.
        route_at: "prompt" (default), or "period" to hold the budget while decoding.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    return evicting(budget, ShortKeys(), GreedyTiers(), route_at=route_at, dtype=dtype)
