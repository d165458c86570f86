"""DefensiveKV: what holds most of the attention is safe, and the worst case decides on the rest, over all heads."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, get_args

import attrs
import torch
from jaxtyping import Float32
from torch import Tensor
from torch.nn.functional import pad

from qevict.contracts.budget import Budget
from qevict.contracts.router import Scope, TierRouter
from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Costs, MovePlan, Need, Observation, Windows
from qevict.errors import PolicyError
from qevict.policy import Policy
from qevict.routers.filling import best, fill, named, rank_candidates, top_up
from qevict.routers.sharing import Groups, as_shares, check_tiers, valid_part, valid_shares
from qevict.scorers.fields import at_least_one
from qevict.shapes import MassByQuery, Scores
from qevict_baselines.composing import evicting
from qevict_baselines.criticalkv import ATTENTION
from qevict_baselines.observing import Observed, observed
from qevict_baselines.pooling import odd, pooled

Bias = Literal["prefix", "observed"]
"""Whose attention lowers the threshold: that on the last windows before the observed ones, or on the observed ones."""

_UNITS = 2**32  # attention is added up in whole numbers of these, so that no order of columns matters

_RISK, _SHARE = "risk", "share"
_NO_MASS = 1e-30


@attrs.frozen
class WorstCase(Scorer):
    """What may be lost at worst: the highest attention that any query of the observation window paid.

    DefensiveKV (arXiv 2510.13334) and algorithm 2, in the order of the authors' code: each query's attention
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


def _shared(_instance: object, _attribute: object, value: object) -> None:
    if value not in ("layer", "model"):
        msg = f"scope is 'layer' (its heads share) or 'model' (those of all layers do); got {value!r}"
        raise PolicyError(msg)


def _valid_bias(_instance: object, _attribute: object, value: object) -> None:
    if value not in get_args(Bias):
        msg = f"window_bias is one of {', '.join(map(repr, get_args(Bias)))}; got {value!r}"
        raise PolicyError(msg)


def _whole(_instance: object, _attribute: object, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"observed_windows is a number of windows, at least 1; got {value!r}"
        raise PolicyError(msg)


@attrs.frozen
class SafeThenWorstCase(TierRouter):
    """Safe windows of each head, then the best of all heads by their worst case.

    DefensiveKV (Feng et al., Taming the Fragility of KV Cache Eviction in LLM Inference, arXiv 2510.13334, algorithm 2
    and the authors' code); with ``scope="model"`` Layer-DefensiveKV, where all layers compete. Safe are each head's
    windows of highest ``"attention"`` that together stay below ``mass`` less the layer's ``window_bias`` of the
    head's attention; the one that crosses that is not among them. They are at most ``P (b + W) / (P + W) - W``, for P
    candidates, W observed windows and b slots per head, and never fewer than none: the authors' figure, in which a
    negative one selects nearly everything. The other slots go to the best others of ``"importance"``, the worst-case
    risk, of all that share. For each tier by itself.

    Faithful: safe windows, threshold and cap, with the bias of the released code, which measures the attention on the
    last windows before the observed ones; ``window_bias="observed"`` measures that on the observed ones themselves, as
    was probably meant: what the candidates leave of 1. No head has a floor. Differs: the observed windows are the
    recent tokens that the policy protects, so that they never compete; in the authors' Layer-DefensiveKV a layer of
    low risk can lose some of its own.

    Stores what its heads keep: ``4 * head_dim`` bytes per token and KV head at 16 bits, ragged over heads and, with
    ``"model"``, layers. All layers then wait for the last one with their prompt uncompressed.

    Args:
        shares: part of the bytes for each tier, hot to cold.
        scope: which lanes compete.
        mass: part of a head's attention that is safe; the authors' 0.9.
        window_bias: whose attention is subtracted from it; with ``"observed"``, that on the policy's sinks counts too.
        observed_windows: W; the authors' 32 tokens, for windows of one token.
    """

    name: ClassVar[str] = "safe_then_worst_case"
    rankings = (ATTENTION, IMPORTANCE)
    shares: tuple[float, ...] = attrs.field(default=(1.0,), converter=as_shares, validator=valid_shares)
    scope: Scope = attrs.field(default="layer", validator=_shared)
    mass: float = attrs.field(default=0.9, validator=valid_part)
    window_bias: Bias = attrs.field(default="prefix", validator=_valid_bias)
    observed_windows: int = attrs.field(default=32, validator=_whole)

    def check(self, tiers: int) -> None:
        """One share per tier."""
        check_tiers(self.shares, tiers)

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        """What is safe, then what is best, tier after tier."""
        attention, importance = (named(rankings, name, self) for name in self.rankings)
        groups, ranks = Groups(windows, self.scope), rank_candidates(attention, windows)
        below, most_attended = groups.gather(self._below_threshold(attention, ranks, windows)), groups.gather(ranks)
        together, candidates = (
            rank_candidates(importance, windows, self.scope),
            groups.gather(windows.candidate).sum(-1),
        )

        def choose(remaining: Tensor, slots: Tensor) -> Tensor:
            safe = best(most_attended, remaining & below, self._cap(candidates, slots))
            return top_up(safe, together, remaining, slots)

        room = groups.room(capacities, costs.tier_bytes, self.shares)
        return MovePlan(fill(groups, costs, room, choose))

    def _cap(self, candidates: Tensor, slots: Tensor) -> Tensor:
        """Most safe windows of each lane, ``[groups, members]``."""
        base, observed = (slots // candidates.shape[1])[:, None], self.observed_windows
        return (candidates * (base + observed) // (candidates + observed) - observed).clamp(min=0)

    def _below_threshold(self, attention: Tensor, ranks: Tensor, windows: Windows) -> Tensor:
        """Windows of each lane, best first, as long as their attention adds up to less than the threshold."""
        known = attention.nan_to_num(nan=0.0, neginf=0.0).clamp(min=0).masked_fill(~windows.candidate, 0)
        peak = pad(known, (0, 1), value=torch.finfo(known.dtype).tiny).amax(1, keepdim=True)
        units = (known / peak * _UNITS).long()
        bias = self._bias(units, windows, peak / _UNITS)
        together = Groups(windows, "layer")
        of_layer = together.gather(bias).mean(1, keepdim=True)
        threshold = self.mass - together.spread(of_layer.expand(-1, windows.lanes_per_row, -1))
        added = torch.empty_like(units).scatter_(1, ranks, units).cumsum(1).gather(1, ranks)
        return added < threshold * units.sum(1, keepdim=True)

    def _bias(self, units: Tensor, windows: Windows, size: Tensor) -> Tensor:
        """Attention of each lane that is looked for in vain among its safe windows, ``[lanes, 1]``."""
        if self.window_bias == "observed":
            return 1 - units.sum(1, keepdim=True) * size
        last = rank_candidates(windows.positions.double(), windows) < self.observed_windows
        return (units * last).sum(1, keepdim=True) * size


def defensivekv(
    budget: Budget | str, *, observed_tokens: int = 32, kernel: int = 5, dtype: torch.dtype | None = None
) -> Policy:
    """What the worst of the observed queries would lose, over all heads of a layer.

    DefensiveKV (Feng et al., arXiv 2510.13334), algorithm 2: see :class:`SafeThenWorstCase` and
    :class:`WorstCase`. Compressed once, at the prompt's end.

    Bytes: full precision for each kept token, and 24 of bookkeeping per token and KV head, ragged over the heads.

    Args:
        budget: bytes per row.
        observed_tokens: the observation window, which every head keeps; the authors' 32.
        kernel: of the pool under the risks; the authors' 5.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    scorer, router = WorstCase(observed_tokens, kernel), SafeThenWorstCase(observed_windows=observed_tokens)
    return evicting(budget, scorer, router, recent_tokens=observed_tokens, route_at="prompt", dtype=dtype)


def layer_defensivekv(
    budget: Budget | str, *, observed_tokens: int = 32, kernel: int = 5, dtype: torch.dtype | None = None
) -> Policy:
    """DefensiveKV over all heads of all layers, which wait uncompressed for the last one.

    Layer-DefensiveKV (Feng et al., arXiv 2510.13334): the peak at the prompt's end is the full cache.

    Bytes: full precision for each kept token, and 24 of bookkeeping per token and KV head, ragged over heads and
    layers.

    Args:
        budget: bytes per row, over all layers.
        observed_tokens: the observation window, which every head keeps; the authors' 32.
        kernel: of the pool under the risks; the authors' 5.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    scorer = WorstCase(observed_tokens, kernel)
    router = SafeThenWorstCase(scope="model", observed_windows=observed_tokens)
    return evicting(budget, scorer, router, recent_tokens=observed_tokens, route_at="prompt", dtype=dtype)
