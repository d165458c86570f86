"""QEvict's routing: fill the hottest tier with the best windows, then the next, and evict what is left."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import attrs
from torch import Tensor

from qevict.contracts.router import Scope, TierRouter
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Costs, MovePlan, Windows
from qevict.routers.filling import best, counted, fill, named, rank_candidates
from qevict.routers.sharing import Groups, as_shares, check_tiers, fits, valid_scope, valid_shares


@attrs.frozen
class GreedyTiers(TierRouter):
    """Each tier gets a share of the bytes; windows fill them by descending score.

    With shares ``(1 - q, q)``: ``K_f = floor((1 - q) B / M_f)`` windows in full precision, ``K_q = floor(q B / M_q)``
    as codes, the rest evicted; QEvict (arXiv 2608.05326), eq. 3-5 and algorithm 1. A window that keeps codes while it
    lives in a hotter tier is billed to the tier whose codes they are, so that fewer windows fit there.

    Args:
        shares: part of the bytes for each tier, hot to cold.
        scope: which lanes share their bytes; their windows are then ranked together.
    """

    name: ClassVar[str] = "greedy"
    shares: tuple[float, ...] = attrs.field(default=(1.0,), converter=as_shares, validator=valid_shares)
    scope: Scope = attrs.field(default="lane", validator=valid_scope)

    def check(self, tiers: int) -> None:
        """One share per tier."""
        check_tiers(self.shares, tiers)

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        """Fill tier after tier."""
        ranks = rank_candidates(named(rankings, IMPORTANCE, self), windows, self.scope)
        groups = Groups(windows, self.scope)
        room = groups.room(capacities, costs.tier_bytes, self.shares)
        place = fill(groups, costs, room, partial(best, ranks))
        return MovePlan(place, counted(windows, costs, room) if self.scope == "lane" else None)

    def fits(self, capacity: int | None, tier_bytes: Sequence[int]) -> tuple[int, ...]:
        """How many windows each tier holds: ``floor(share * bytes / window bytes)``."""
        return fits(capacity, tier_bytes, self.shares)
