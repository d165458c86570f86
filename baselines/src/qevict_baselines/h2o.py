"""H2O: half of the budget for the latest tokens, half for those that were attended most."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.budget import Budget
from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Costs, MovePlan, Windows
from qevict.policy import Policy
from qevict.routers.filling import best_of_two, counted, fill, named, rank_candidates
from qevict.routers.greedy import GreedyTiers
from qevict.routers.sharing import Groups, as_shares, check_tiers, valid_part, valid_shares
from qevict.scorers.cumulative import CumulativeAttention
from qevict_baselines.accumulators import NormalisedAttention
from qevict_baselines.composing import evicting


@attrs.frozen
class HeavyAndRecent(TierRouter):
    """The latest windows of each lane first, then its heavy hitters.

    H2O (Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference, arXiv 2306.14048, and
    the authors' real-drop code): of the slots, ``int(recent_share * slots)`` go to the latest positions, the rest to
    the best others of ``"importance"``, which is accumulated attention. For each tier by itself.

    Faithful: what is evicted is gone, and the recent part is part of the budget. Differs: what the policy protects is
    kept besides. To let the router hold all recent tokens, protect as few as the policy allows.

    Stores what it keeps: ``4 * head_dim`` bytes per token and KV head at 16 bits.

    Args:
        shares: part of the bytes for each tier, hot to cold.
        recent_share: part of the slots for the latest positions; the paper's half.
    """

    name: ClassVar[str] = "heavy_and_recent"
    earlier_wins = False
    shares: tuple[float, ...] = attrs.field(default=(1.0,), converter=as_shares, validator=valid_shares)
    recent_share: float = attrs.field(default=0.5, validator=valid_part)

    def check(self, tiers: int) -> None:
        """One share per tier."""
        check_tiers(self.shares, tiers)

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        """Recent ones, then heavy ones, tier after tier."""
        latest = rank_candidates(windows.positions.double(), windows)
        heaviest = rank_candidates(named(rankings, IMPORTANCE, self), windows)
        groups = Groups(windows, self.scope)
        room = groups.room(capacities, costs.tier_bytes, self.shares)
        place = fill(
            groups, costs, room, lambda left, slots: best_of_two(latest, heaviest, left, slots, self.recent_share)
        )
        return MovePlan(place, counted(windows, costs, room))


def h2o(budget: Budget | str, *, recent_share: float = 0.5, dtype: torch.dtype | None = None) -> Policy:
    """Half of the budget for the latest tokens, half for heavy hitters, head by head, one out for each that comes.

    H2O (Zhang et al., arXiv 2306.14048): see :class:`HeavyAndRecent`; the score of a kept token is the
    attention that it has got from all queries so far, averaged over the query heads that share its key. Original
    positions.

    Bytes: full precision for each kept token, and 16 of bookkeeping, its score among them, per token and KV head.

    Args:
        budget: bytes per row.
        recent_share: part for the latest tokens; the paper's half.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    router = HeavyAndRecent(recent_share=recent_share)
    return evicting(budget, CumulativeAttention(), router, period_tokens=1, dtype=dtype)


def observed_attention(budget: Budget | str, *, dtype: torch.dtype | None = None) -> Policy:
    """H2O's average form: attention per query that could see the token, at the prompt's end, nothing recent protected.

    As kvpress has it (ObservedAttentionPress); not the rule of H2O's paper (arXiv 2306.14048).

    Bytes: full precision for each kept token, and 16 of bookkeeping per token and KV head.

    Args:
        budget: bytes per row.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    return evicting(budget, NormalisedAttention(), GreedyTiers(), route_at="prompt", dtype=dtype)
