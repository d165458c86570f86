"""CriticalKV: half of a budget by attention, the rest by what a window's loss would do to the layer's output."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.budget import Budget
from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Costs, MovePlan, Need, Observation, RouteAt, Windows
from qevict.errors import PolicyError
from qevict.policy import Policy
from qevict.routers.filling import best_of_two, counted, fill, named, rank_candidates
from qevict.routers.sharing import Groups, as_shares, check_tiers, valid_part, valid_shares
from qevict.shapes import Scores
from qevict_baselines.adakv import AdaptiveHeads, Floor, fill_heads
from qevict_baselines.composing import evicting
from qevict_baselines.pooling import Pool
from qevict_baselines.snapkv import ObservationWindow

ATTENTION = "attention"
"""The ranking by which the first stage chooses; the second goes by the ranking that all routers read."""

_NORMS = "norms"


def _of_masses(_instance: object, _attribute: "attrs.Attribute[Scorer]", base: Scorer) -> None:
    more = base.needs - OutputNorms.needs
    if more:
        names = ", ".join(sorted(each.value for each in more))
        msg = f"OutputNorms shows its base no {names}, which {base.name!r} needs; take a base of attention masses"
        raise PolicyError(msg)


@attrs.frozen
class OutputNorms(Scorer):
    """How much the layer's output would lose: a base score times the L1 norm of the value through ``W_O``.

    CriticalKV (arXiv 2502.03805). Ranks twice, as its router reads it: "attention" is the base score A,
    for the first stage; the importance is ``(A + epsilon) * ||v W_O||_1``, for the second. The norm is the mean over
    the query heads that read the value.

    Faithful: windows of one token, lanes of one KV head, the base's observation window protected, so that the first
    stage is spent on the tokens before it (in NVIDIA's kvpress the window takes part and uses it up). Different: a
    longer window counts by the sum of its tokens' norms, a lane of several KV heads by the mean over heads.

    Args:
        base: a scorer of attention masses; SnapKV's (default), as in the paper.
        epsilon: 1e-4 (default) as in kvpress.

    Bytes: 4 per window and lane, and those of the base.
    """

    name: ClassVar[str] = "output_norms"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS, Need.FIRST_LOOKS, Need.VALUES, Need.OUTPUT_PROJECTION})
    base: Scorer = attrs.field(factory=ObservationWindow, validator=_of_masses)
    epsilon: float = 1e-4
    prompt_queries: int | None = attrs.field(init=False, repr=False)
    prompt_stride: int = attrs.field(init=False, repr=False)
    observe_tokens: int | None = attrs.field(init=False, repr=False)

    @prompt_queries.default
    def _prompt_queries(self) -> int | None:
        return self.base.prompt_queries

    @prompt_stride.default
    def _prompt_stride(self) -> int:
        return self.base.prompt_stride

    @observe_tokens.default
    def _observe_tokens(self) -> int | None:
        return self.base.observe_tokens

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing seen."""
        zeros = torch.zeros(lanes, windows, dtype=torch.float32, device=device)
        return {**_prefixed(self.base.start(lanes, windows, device)), _NORMS: zeros}

    def update(self, state: State, observation: Observation) -> State:
        """Add the norms of the new values, and show the base what there is of masses."""
        assert observation.output is not None
        assert observation.values is not None
        norms = observation.output.norms(observation.values).mean(dim=(1, 2))
        own = {_NORMS: state[_NORMS] + observation.sum_by_window(norms)}
        if observation.mass is None:
            return {**state, **own}
        return {**_prefixed(self.base.update(_of_base(state), observation)), **own}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """Rank by attention, and by attention times the norm."""
        attention = self.base.rank(_of_base(state), windows)[IMPORTANCE]
        return {ATTENTION: attention, IMPORTANCE: (attention + self.epsilon) * state[_NORMS]}


def _prefixed(state: State) -> State:
    return {f"base {name}": array for name, array in state.items()}


def _of_base(state: State) -> State:
    return {name.removeprefix("base "): array for name, array in state.items() if name != _NORMS}


@attrs.frozen
class TwoStages(TierRouter):
    """The best by attention first, then the best by importance, in each lane.

    CriticalKV (Feng et al., arXiv 2502.03805): with a budget of b windows, ``int(first_share * b)`` are
    the best of the ranking ``"attention"``, and the rest the best others of ``"importance"``, which its scorer makes
    attention times the norm of the projected value. For each tier by itself.

    Faithful: the two stages, on the windows before the observation window, which the policy protects. kvpress counts
    that window in both stages, so that it uses up the first.

    Stores what it keeps: ``4 * head_dim`` bytes per token and KV head at 16 bits.

    Args:
        shares: part of the bytes for each tier, hot to cold.
        first_share: the paper's alpha, 0.5: part of the slots for the first stage.
    """

    name: ClassVar[str] = "two_stages"
    rankings = (ATTENTION, IMPORTANCE)
    shares: tuple[float, ...] = attrs.field(default=(1.0,), converter=as_shares, validator=valid_shares)
    first_share: float = attrs.field(default=0.5, validator=valid_part)

    def check(self, tiers: int) -> None:
        """One share per tier."""
        check_tiers(self.shares, tiers)

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        """Both stages, tier after tier."""
        first, second = (rank_candidates(named(rankings, name, self), windows) for name in self.rankings)
        groups = Groups(windows, self.scope)
        room = groups.room(capacities, costs.tier_bytes, self.shares)
        place = fill(groups, costs, room, lambda left, slots: best_of_two(first, second, left, slots, self.first_share))
        return MovePlan(place, counted(windows, costs, room))


@attrs.frozen
class AdaptiveTwoStages(TierRouter):
    """AdaKV says how many windows a head keeps, CriticalKV which.

    Ada-CriticalKV (arXiv 2502.03805, with arXiv 2407.11550): the heads' budgets ``b_g`` come from the ranking
    ``"attention"``; of each, ``int(first_share * b_g)`` windows are its best, and the rest the best others of
    ``"importance"``. As in the authors' plug-in; on what differs see :class:`TwoStages` and
    :class:`~qevict_baselines.adakv.AdaptiveHeads`. Stores what its heads keep, ragged over the heads.

    Args:
        heads: the allocation, with the shares of the tiers.
        first_share: part of each budget for the first stage.
    """

    name: ClassVar[str] = "adaptive_two_stages"
    scope = "layer"
    rankings = (ATTENTION, IMPORTANCE)
    heads: AdaptiveHeads = attrs.field(factory=AdaptiveHeads)
    first_share: float = attrs.field(default=0.5, validator=valid_part)

    def check(self, tiers: int) -> None:
        """One share per tier."""
        self.heads.check(tiers)

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        """Each head's budget in two stages, tier after tier."""
        scores = [named(rankings, name, self) for name in self.rankings]
        groups, budgets = Groups(windows, self.scope), self.heads.budgets(scores[0], windows)
        first, second = (groups.gather(rank_candidates(each, windows)) for each in scores)
        room = groups.room(capacities, costs.tier_bytes, self.heads.shares)
        place = fill_heads(
            groups,
            costs,
            room,
            budgets,
            lambda left, budget: best_of_two(first, second, left, budget, self.first_share),
        )
        return MovePlan(place)


def criticalkv(
    budget: Budget | str,
    *,
    first_share: float = 0.5,
    observed_tokens: int = 32,
    kernel: int = 5,
    pool: Pool = "average",
    route_at: RouteAt = "prompt",
    dtype: torch.dtype | None = None,
) -> Policy:
    """SnapKV's scores for half of each head's budget, times the norm of the projected value for the rest.

    CriticalKV (Feng et al., arXiv 2502.03805): see :class:`TwoStages` and
    :class:`OutputNorms`.

    Bytes: full precision for each kept token, and 20 of bookkeeping per token and KV head.

    Args:
        budget: bytes per row.
        first_share: the paper's alpha, 0.5.
        observed_tokens: the observation window, which every head keeps.
        kernel: of the pool under the scores, as in SnapKV.
        pool: likewise.
        route_at: "prompt" (default, the paper's), or "period" to hold the budget while decoding.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    scorer = OutputNorms(ObservationWindow(observed_tokens, kernel, pool))
    router = TwoStages(first_share=first_share)
    return evicting(budget, scorer, router, recent_tokens=observed_tokens, route_at=route_at, dtype=dtype)


def ada_criticalkv(
    budget: Budget | str,
    *,
    alpha: float = 0.2,
    floor: Floor = "hard",
    first_share: float = 0.5,
    observed_tokens: int = 32,
    kernel: int = 5,
    pool: Pool = "average",
    route_at: RouteAt = "prompt",
    dtype: torch.dtype | None = None,
) -> Policy:
    """AdaKV's budgets, CriticalKV's choice within them.

    CriticalKV (arXiv 2502.03805) on AdaKV (arXiv 2407.11550): see :class:`AdaptiveTwoStages`.

    Bytes: full precision for each kept token, and 20 of bookkeeping per token and KV head, ragged over the heads.

    Args:
        budget: bytes per row.
        alpha: weight of the uniform share in AdaKV; 0.2.
        floor: "hard" (default), as in the public plug-in, or "blend", AdaKV's own.
        first_share: part of each head's budget for the first stage; 0.5.
        observed_tokens: the observation window, which every head keeps.
        kernel: of the pool under the scores, as in SnapKV.
        pool: likewise.
        route_at: "prompt" (default, the paper's), or "period" to hold the budget while decoding.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    scorer = OutputNorms(ObservationWindow(observed_tokens, kernel, pool))
    router = AdaptiveTwoStages(AdaptiveHeads(alpha=alpha, floor=floor), first_share)
    return evicting(budget, scorer, router, recent_tokens=observed_tokens, route_at=route_at, dtype=dtype)
