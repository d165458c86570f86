"""SnapKV: LLM Knows What You are Looking for Before Generation (arXiv 2404.14469)."""

from typing import ClassVar, Literal, get_args

import attrs
import torch

from qevict.contracts.budget import Budget
from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, RouteAt, Windows
from qevict.policy import Policy
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.fields import at_least_one, at_least_one_or_none, one_of
from qevict.shapes import Scores
from qevict_baselines.accumulators import no_mass, with_masses
from qevict_baselines.composing import evicting
from qevict_baselines.observing import observed
from qevict_baselines.pooling import Pool, odd, pooled

OverHeads = Literal["mean", "max"]
"""How the query heads of a lane become one."""


@attrs.frozen
class ObservationWindow(Scorer):
    """Attention that the prompt's last queries pay, pooled over neighbours, so that a fact is kept with its context.

    SnapKV (arXiv 2404.14469): the mean over the window's queries of their softmax over all that they see, then pooled
    along positions.

    Faithful: windows of one token and ``recent_tokens = prompt_queries``, so that candidates at the prompt's end are
    the tokens before the observation window. Different: a lane's query heads are averaged before the pool, as the
    authors of AdaKV do (an average pool commutes with it); SnapKV's own code stores each KV head once per query head.
    The sum is divided by the whole window also where fewer queries were looked at, which ranks alike. After the prompt
    each period looks anew, where the paper compresses once. On longer routing windows, masses are of windows and
    neighbours are windows. After an eviction, neighbours are what is left.

    Args:
        prompt_queries: the observation window; 32 (default) is what the authors' code fills in.
        kernel: windows that are pooled into one; 5 (default) is the authors', 7 in their LongBench runs.
        pool: "average" (default, the authors') or "max" (their LongBench runs).
        observe_tokens: after the prompt, look at the last n tokens before each event only; None (default) for all.

    Bytes: 4 per window and lane.
    """

    name: ClassVar[str] = "observation_window"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS, Need.FIRST_LOOKS})
    prompt_queries: int = attrs.field(default=32, validator=at_least_one)
    kernel: int = attrs.field(default=5, validator=odd)
    pool: Pool = attrs.field(default="average", validator=one_of(*get_args(Pool)))
    observe_tokens: int | None = attrs.field(default=None, validator=at_least_one_or_none)

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing seen."""
        return {"mass": no_mass(lanes, windows, device)}

    def update(self, state: State, observation: Observation) -> State:
        """Add the forward's masses; a period begins with none."""
        return {"mass": with_masses(state["mass"], observation, kept=0.0)}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """Pool over the candidates."""
        means = state["mass"] / self.prompt_queries
        return {IMPORTANCE: pooled(means, windows.positions, windows.candidate, self.kernel, self.pool)}


@attrs.frozen
class PooledHeads(Scorer):
    """SnapKV's score with each query head pooled by itself, before a lane's query heads are brought together.

    A variant of :class:`ObservationWindow` (arXiv 2404.14469): NVIDIA's kvpress pools first and averages then, which
    differs from it under a max pool alone; KVCache-Factory takes the maximum over heads, as an option. Scored once, at
    the prompt's end; what is decoded later scores 0. With longer routing windows, pooling takes each window that begins
    before the observation window.

    Args:
        prompt_queries: the observation window; 32 (default) is what the authors' code fills in.
        kernel: windows that are pooled into one; 5 (default) is the authors'.
        pool: "average" (default) or "max".
        over_heads: "mean" (default, as kvpress) or "max".

    Bytes: 4 per window and lane.
    """

    name: ClassVar[str] = "pooled_heads"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS_BY_QUERY, Need.POSITIONS})
    prompt_queries: int = attrs.field(default=32, validator=at_least_one)
    kernel: int = attrs.field(default=5, validator=odd)
    pool: Pool = attrs.field(default="average", validator=one_of(*get_args(Pool)))
    over_heads: OverHeads = attrs.field(default="mean", validator=one_of(*get_args(OverHeads)))

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing seen."""
        return {"mass": no_mass(lanes, windows, device)}

    def update(self, state: State, observation: Observation) -> State:
        """Pool each head's mean mass, where the prompt ends."""
        seen = observed(observation)
        if seen is None:
            return state
        means = seen.masses.sum(dim=2) / seen.queries[:, None, None]
        heads = pooled(means, seen.positions, seen.before, self.kernel, self.pool)
        return {"mass": heads.mean(dim=1) if self.over_heads == "mean" else heads.amax(dim=1)}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """What was seen where the prompt ended."""
        return {IMPORTANCE: state["mass"]}


def snapkv(
    budget: Budget | str,
    *,
    observed_tokens: int = 32,
    kernel: int = 5,
    pool: Pool = "average",
    route_at: RouteAt = "prompt",
    dtype: torch.dtype | None = None,
) -> Policy:
    """The prompt's last tokens, and what they attend to with its neighbours, head by head.

    SnapKV (Li et al., LLM Knows What You are Looking for Before Generation, arXiv 2404.14469): see
    :class:`ObservationWindow`. Compressed once, at the prompt's end; what is decoded stays.

    Bytes: full precision for each kept token, and 16 of bookkeeping per token and KV head.

    Args:
        budget: bytes per row.
        observed_tokens: the observation window, which is kept; 32 as in the authors' code.
        kernel: 5 as in the authors' code; 7 in their LongBench runs.
        pool: "average" as in the authors' code; "max" in their LongBench runs.
        route_at: "prompt" (default, the paper's), or "period" to hold the budget while decoding.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    scorer = ObservationWindow(observed_tokens, kernel, pool)
    return evicting(budget, scorer, GreedyTiers(), recent_tokens=observed_tokens, route_at=route_at, dtype=dtype)
