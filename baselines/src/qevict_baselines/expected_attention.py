"""Expected Attention (arXiv 2510.00636): compression by estimating attention of future queries."""

import math
from typing import ClassVar

import attrs
import torch
from jaxtyping import Float32
from torch import Tensor

from qevict.contracts.budget import Budget
from qevict.contracts.rotary import Rotary
from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Held, Need, Observation, Windows
from qevict.policy import Policy
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.fields import at_least_one, at_least_one_or_none
from qevict.shapes import LaneTokens, PerLane, Scores
from qevict_baselines.composing import evicting

Moments = tuple[Float32[Tensor, "lanes heads group head_dim"], Float32[Tensor, "lanes heads group head_dim head_dim"]]
"""Mean and covariance of queries, by query head."""


@attrs.frozen
class ExpectedAttention(Scorer):
    """Attention that queries to come are expected to pay, if they are distributed as those of the prompt.

    Expected Attention (arXiv 2510.00636), as in NVIDIA's kvpress: the prompt's queries before RoPE, without
    those of the first tokens, give a mean and a covariance per query head; both are turned by the mean rotation over
    the positions to come. Of a Gaussian query the expected exponential is ``exp(k.mean / sqrt(d) + k'.covariance.k /
    2d)``. It is normalised over what is held behind the sinks, averaged over the group, and multiplied by the value's
    L2 norm.

    Faithful: windows of one token, lanes of one KV head, the policy's sinks as many as ``sink_tokens``. Scored once, at
    the prompt's end; what is decoded later scores 0. Different: a longer window counts by the sum of its tokens, a lane
    of several KV heads by the mean over heads; logits are divided by sqrt(d) also where a model scales otherwise.

    Args:
        prompt_queries: use the last n queries of the prompt only; None (default) for all, as kvpress.
        sink_tokens: queries of the prompt's first n tokens are left out; 4 (default) as in kvpress.
        future_tokens: positions to come that rotations are averaged over; 512 (default) as in kvpress.
        use_covariance: False takes the mean query for all; True (default) as in kvpress.
        use_value_norm: False leaves the values out; True (default) as in kvpress.
        epsilon: added to the attention before the value counts; 0 (default) as in kvpress.

    Bytes: 4 per window and lane.
    """

    name: ClassVar[str] = "expected_attention"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.QUERIES, Need.PROMPT, Need.ROTARY})
    prompt_queries: int | None = attrs.field(default=None, validator=at_least_one_or_none)
    sink_tokens: int = 4
    future_tokens: int = attrs.field(default=512, validator=at_least_one)
    use_covariance: bool = True
    use_value_norm: bool = True
    epsilon: float = 0.0

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing expected."""
        return {"expected": torch.zeros(lanes, windows, dtype=torch.float32, device=device)}

    def update(self, state: State, observation: Observation) -> State:
        """Score everything where the prompt ends."""
        held = observation.held
        if held is None:
            return state
        scores = (self._attention(observation, held) + self.epsilon) * self._weights(held)
        return {"expected": observation.sum_by_window(scores.mean(dim=1), held.columns)}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """What the prompt let expect."""
        return {IMPORTANCE: state["expected"]}

    def _attention(self, observation: Observation, held: Held) -> Float32[Tensor, "lanes heads tokens"]:
        """Expected attention on everything held behind the sinks, averaged over the group."""
        rotary, queries, asked = observation.rotary, observation.queries, observation.asked
        assert rotary is not None
        assert queries is not None
        assert asked is not None
        latest, offset = _latest(held)
        before = rotary.unrotate(queries, (asked + offset[:, None])[:, None, None])
        mean, covariance = _turned(_moments(before, asked >= self.sink_tokens), rotary, latest, self.future_tokens)
        outside = held.columns < 0
        keys, size = held.keys.float().masked_fill(outside[:, None, :, None], 0), held.keys.shape[-1]
        logits = (keys[:, :, None] @ mean[..., None])[..., 0] / math.sqrt(size)
        if self.use_covariance:
            logits = logits + ((keys[:, :, None] @ covariance) * keys[:, :, None]).sum(-1) / (2 * size)
        weights = logits.masked_fill(outside[:, None, None], -torch.inf).softmax(dim=-1)
        return weights.nan_to_num(nan=0.0).mean(dim=2)

    def _weights(self, held: Held) -> Tensor:
        if not self.use_value_norm:
            return torch.ones(held.values.shape[:3], dtype=torch.float32, device=held.values.device)
        norms: Tensor = torch.linalg.vector_norm(held.values.float(), dim=-1)
        return norms.masked_fill((held.columns < 0)[:, None], 0)


def _latest(held: Held) -> tuple[PerLane, PerLane]:
    """Rotary position of each lane's latest token, and how much it is above the true one, as for all of the prompt."""
    index = held.positions.argmax(dim=1, keepdim=True)
    rotary = held.rotary_positions.gather(1, index)[:, 0]
    return rotary, rotary - held.positions.gather(1, index)[:, 0]


def _moments(queries: Float32[Tensor, "lanes heads group queries head_dim"], among: Tensor) -> Moments:
    """Mean and covariance (over the number of queries) of those that count."""
    counts, valid = among.sum(dim=1).clamp(min=1)[:, None, None, None], among[:, None, None, :, None]
    mean = queries.masked_fill(~valid, 0).sum(dim=3) / counts
    centred = (queries - mean[..., None, :]).masked_fill(~valid, 0)
    return mean, centred.mT @ centred / counts[..., None]


def _turned(moments: Moments, rotary: Rotary, latest: PerLane, future: int) -> Moments:
    """Moments of the queries at the positions to come, by the mean of the rotations to these positions."""
    mean, covariance = moments
    positions: LaneTokens = latest[:, None] + torch.arange(1, future + 1, device=latest.device)
    cos, sin = (rotary.amplitude * table.mean(dim=1)[:, None, None, None] for table in rotary.angles(positions))
    once = _rotated(covariance, cos, sin)
    return _rotated(mean[..., None, :], cos, sin)[..., 0, :], _rotated(once.mT, cos, sin)


def _rotated(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channel ``i`` and ``i + pairs`` turned together, as RoPE does; further channels stay."""
    pairs = cos.shape[-1]
    low, high, still = vectors.split((pairs, pairs, vectors.shape[-1] - 2 * pairs), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, still), dim=-1)


def expected_attention(
    budget: Budget | str,
    *,
    sink_tokens: int = 4,
    future_tokens: int = 512,
    use_covariance: bool = True,
    use_value_norm: bool = True,
    epsilon: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Policy:
    """What queries to come are expected to attend to, head by head, from the distribution of the prompt's queries.

    Expected Attention (Devoto et al., arXiv 2510.00636): see :class:`ExpectedAttention`. Compressed once, at the
    prompt's end.

    Bytes: full precision for each kept token, and 16 of bookkeeping per token and KV head.

    Args:
        budget: bytes per row.
        sink_tokens: first tokens, which are kept, and whose queries do not count; 4 as in kvpress.
        future_tokens: positions to come that are averaged over; 512 as in kvpress.
        use_covariance: False takes the mean query for all.
        use_value_norm: False leaves the values out.
        epsilon: added to the attention before the value counts.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    scorer = ExpectedAttention(
        sink_tokens=sink_tokens,
        future_tokens=future_tokens,
        use_covariance=use_covariance,
        use_value_norm=use_value_norm,
        epsilon=epsilon,
    )
    return evicting(budget, scorer, GreedyTiers(), sink_tokens=sink_tokens, route_at="prompt", dtype=dtype)
