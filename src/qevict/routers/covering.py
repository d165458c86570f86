"""Keep as much as codes can hold, and spend what is left over on the best of it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import attrs
from torch import Tensor

from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Costs, MovePlan, Windows
from qevict.errors import PolicyError
from qevict.routers.filling import best, counted, fill, named, rank_candidates
from qevict.routers.sharing import UNLIMITED, Groups


@attrs.frozen
class CoverFirst(TierRouter):
    """As many windows as fit into the coldest tier; what bytes are left lift the best of these into the hottest.

    With ``n`` windows and ``B`` bytes: the best ``m = min(n, floor(B / M_q))`` are kept, and the best
    ``floor((B - m M_q) / M_f)`` of these in full precision. So a small budget holds codes alone, and a large one
    everything in full precision, without a share to be chosen. A window in the hottest tier may keep its codes, which
    are paid for.
    """

    name: ClassVar[str] = "cover_first"

    def check(self, tiers: int) -> None:
        """One tier or two.

        Raises:
            PolicyError: there are more.
        """
        if tiers > 2:
            msg = f"router {self.name!r} fills the coldest tier and lifts into the hottest, got {tiers} tiers; give two"
            raise PolicyError(msg)

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        """Cover, then lift."""
        ranks = rank_candidates(named(rankings, IMPORTANCE, self), windows)
        lanes = zip(windows.candidates, capacities, strict=True)
        room = [_room(candidates, capacity, costs.tier_bytes) for candidates, capacity in lanes]
        place = fill(Groups(windows, self.scope), costs, room, partial(best, ranks))
        return MovePlan(place, counted(windows, costs, room))


def _room(candidates: int, capacity: int | None, tier_bytes: Sequence[int]) -> tuple[int, ...]:
    """Slots of each tier; the colder one has room for all that are kept, copies of lifted windows among them."""
    if capacity is None:
        return (UNLIMITED, *(0 for _ in tier_bytes[1:]))
    *hotter, coldest = tier_bytes
    covered = min(candidates, capacity // coldest)
    return (*((capacity - covered * coldest) // hot for hot in hotter), covered)
