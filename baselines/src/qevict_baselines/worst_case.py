"""DefensiveKV's scores: Taming the Fragility of KV Cache Eviction in LLM Inference (arXiv 2510.13334)."""

from typing import ClassVar

import attrs
import torch
from jaxtyping import Float32
from torch import Tensor

from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.scorers.fields import at_least_one
from qevict.shapes import MassByQuery, Scores
from qevict_baselines.defensivekv import ATTENTION
from qevict_baselines.observing import Observed, observed
from qevict_baselines.pooling import odd, pooled

_RISK, _SHARE = "risk", "share"
_NO_MASS = 1e-30


@attrs.frozen
class WorstCase(Scorer):
    """What may be lost at worst: the highest attention that any query of the observation window paid.

    DefensiveKV (arXiv 2510.13334), section 4 and algorithm 2, in the order of the authors' code: each query's attention
    on the tokens before the observation window is pooled and scaled to the mass that it had; the risk is the maximum
    over queries and over the group, and at least the lane's mean risk; the importance is the risk times the share that
    the value's ``||v W_O||_1`` has of those of all KV heads at the same token. "attention" is the mean attention, not
    pooled, for the router's first stage.

    Faithful: windows of one token, lanes of one KV head, ``recent_tokens = prompt_queries``. Scored once, at the
    prompt's end; what is decoded later has no risk of its own and so the mean. Different: a longer window counts by the
    sum of its tokens, and pooling takes each window that begins before the observation window; a lane of several KV
    heads takes the highest risk and share of its heads. Lanes of a row share: the norm is a share of the row's.

    Args:
        prompt_queries: the observation window; 32 (default) is the authors'.
        kernel: windows that are averaged into one; 5 (default) is the authors'.

    Bytes: 12 per window and lane.
    """

    name: ClassVar[str] = "worst_case"
    needs: ClassVar[frozenset[Need]] = frozenset(
        {Need.MASS_BY_QUERY, Need.POSITIONS, Need.VALUES, Need.OUTPUT_PROJECTION}
    )
    lanes_share_row: ClassVar[bool] = True
    prompt_queries: int = attrs.field(default=32, validator=at_least_one)
    kernel: int = attrs.field(default=5, validator=odd)

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing seen."""
        zeros = torch.zeros(lanes, windows, dtype=torch.float32, device=device)
        return {_RISK: zeros, ATTENTION: zeros, _SHARE: zeros}

    def update(self, state: State, observation: Observation) -> State:
        """Add the new values' shares, and take the risk where the prompt ends."""
        shared = {**state, _SHARE: state[_SHARE] + observation.sum_by_window(_shares(observation))}
        seen = observed(observation)
        if seen is None:
            return shared
        attention = seen.masses.mean(dim=1).sum(dim=1) / seen.queries[:, None]
        return {**shared, _RISK: _smoothed(seen, self.kernel).amax(dim=(1, 2)), ATTENTION: attention}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """The risk, at least the mean over candidates, by the share of the norm."""
        risk = state[_RISK].masked_fill(~windows.candidate, 0)
        prior = risk.sum(dim=1, keepdim=True) / windows.candidate.sum(dim=1, keepdim=True).clamp(min=1)
        return {IMPORTANCE: torch.maximum(risk, prior) * state[_SHARE], ATTENTION: state[ATTENTION]}


def _smoothed(seen: Observed, kernel: int) -> MassByQuery:
    """Each row pooled over what lies before the observation window, with the mass that it had there."""
    smooth = pooled(seen.masses, seen.positions, seen.before, kernel)
    mass = seen.masses.masked_fill(~seen.before[:, None, None], 0).sum(dim=-1, keepdim=True)
    return smooth * (mass / smooth.sum(dim=-1, keepdim=True).clamp(min=_NO_MASS))


def _shares(observation: Observation) -> Float32[Tensor, "lanes tokens"]:
    """Of each new token, the norm of its value's output as a share of all KV heads of the row; of its highest head."""
    assert observation.output is not None
    assert observation.values is not None
    norms = observation.output.norms(observation.values).mean(dim=2)
    by_row: Tensor = norms.unflatten(0, (-1, observation.lanes_per_row))
    shares = by_row / by_row.sum(dim=(1, 2), keepdim=True).clamp(min=_NO_MASS)
    return shares.flatten(0, 1).amax(dim=1)
