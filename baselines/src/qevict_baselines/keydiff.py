"""KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference (arXiv 2504.15364)."""

from typing import ClassVar, Literal, get_args

import attrs
import torch
from jaxtyping import Float32
from torch import Tensor
from torch.nn import functional

from qevict.contracts.budget import Budget
from qevict.contracts.rotary import Rotary
from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Held, Need, Observation, RouteAt, Windows
from qevict.policy import Policy
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.fields import none_or_more, one_of
from qevict.shapes import Scores
from qevict_baselines.composing import evicting

Domain = Literal["rotated", "pre_rope"]
"""The keys as they are cached, or as they were before RoPE."""


_FIRST = 1e4
"""Above any sum of cosines over the tokens of a window; small enough to leave these four digits apart."""


@attrs.frozen
class KeyDiff(Scorer):
    """Keeps windows whose keys point elsewhere than most: minus the cosine between a key and the mean direction.

    KeyDiff (arXiv 2504.15364): the anchor of a KV head is the mean over all that is held, sinks
    and recent tokens included, of keys of length one. No attention is needed, so any backend serves, and the question
    need not be known.

    Faithful: windows of one token, ``domain="rotated"``, lanes of one KV head. Scored anew at every event, over what is
    then held; the paper also compresses while it reads the prompt. Different: a longer window, and a lane of several KV
    heads, count by the sum over tokens and the mean over heads.

    Args:
        domain: "rotated" (default, the paper's) takes keys as they are cached; "pre_rope" turns them back first, so
            that the anchor is not blurred by positions. That is another method, and not the paper's.
        newest_tokens: windows that lie within the last n tokens rank before all others; 0 (default, the paper's) for
            none. Unlike recent tokens of a policy they may be stored as codes.

    Bytes: 4 per window and lane.
    """

    name: ClassVar[str] = "keydiff"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.HELD, Need.ROTARY})
    domain: Domain = attrs.field(default="rotated", validator=one_of(*get_args(Domain)))
    newest_tokens: int = attrs.field(default=0, validator=none_or_more)

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing seen."""
        return {"difference": torch.zeros(lanes, windows, dtype=torch.float32, device=device)}

    def update(self, state: State, observation: Observation) -> State:
        """Score everything anew, whenever everything is shown."""
        if observation.held is None:
            return state
        return {"difference": by_window(observation, observation.held, self.domain)}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """How much the keys differ from the rest, behind those of the newest tokens."""
        newest = windows.lengths[:, None] - windows.positions <= self.newest_tokens
        return {IMPORTANCE: state["difference"] + _FIRST * newest}


def by_window(observation: Observation, held: Held, domain: Domain) -> Float32[Tensor, "lanes windows"]:
    """KeyDiff's score of all windows: mean over the lane's KV heads, sum over tokens."""
    assert observation.rotary is not None
    keys = held.keys if domain == "rotated" else _turned_back(held, observation.rotary)
    return observation.sum_by_window(differences(keys, held.positions >= 0).mean(dim=1), held.columns)


def differences(keys: Tensor, written: Tensor) -> Float32[Tensor, "lanes heads tokens"]:
    """Minus the cosine between each key and the mean direction of its head's keys; 0 where nothing is written."""
    directions = functional.normalize(keys.float(), dim=-1).masked_fill(~written[:, None, :, None], 0)
    anchors = functional.normalize(directions.sum(dim=2, keepdim=True), dim=-1)
    return -(directions * anchors).sum(dim=-1)


def _turned_back(held: Held, rotary: Rotary) -> Tensor:
    return rotary.unrotate(held.keys, held.rotary_positions[:, None])


def keydiff(
    budget: Budget | str,
    *,
    domain: Domain = "rotated",
    period_tokens: int = 8,
    route_at: RouteAt = "period",
    dtype: torch.dtype | None = None,
) -> Policy:
    """Keys that differ most from the mean direction, head by head; no attention is looked at.

    KeyDiff (Park et al., arXiv 2504.15364): see :class:`KeyDiff`. Compressed at the prompt's end and then
    block by block; the paper does so within the prompt as well.

    Bytes: full precision for each kept token, and 16 of bookkeeping per token and KV head.

    Args:
        budget: bytes per row.
        domain: "rotated" (default, the paper's), or "pre_rope", not the paper's: keys before they are rotated.
        period_tokens: tokens of a block; room for a block is part of the budget.
        route_at: "prompt" compresses once.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    return evicting(budget, KeyDiff(domain), GreedyTiers(), period_tokens=period_tokens, route_at=route_at, dtype=dtype)
