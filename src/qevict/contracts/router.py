"""The tier router: in which tier each window lives."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from qevict.contracts.values import Costs, Geometry, MovePlan, Windows


class TierRouter(ABC):
    """Says in which tier each window lives. A frozen value, and the only part that sees budgets.

    Laws:
        * Pure: equal input, equal plan.
        * Every window in exactly one place: a tier, or evicted. Protected and absent windows keep the place they have.
        * The planned bytes of a lane are at most its capacity, as long as the codes that its windows already keep in a
          tier fit that tier's part of it (they do: capacities of a lane never shrink).
        * Of two windows with equal scores the earlier position wins.
        * No host synchronisation.
    """

    name: ClassVar[str]

    def share(self, total_bytes: int, geometry: Geometry) -> tuple[int, ...]:
        """Split a row's bytes over the layers; equal unless a router says otherwise."""
        return (total_bytes // geometry.layers,) * geometry.layers

    @abstractmethod
    def check(self, tiers: int) -> None:
        """Refuse a number of tiers that this router cannot serve.

        Raises:
            PolicyError: with the remedy.
        """

    @abstractmethod
    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        """Place every candidate.

        Lanes are those of one layer, or of several layers, one after another.

        Args:
            rankings: from the scorer, ``[lanes, windows]`` each.
            windows: what is to be placed.
            costs: bytes by tier.
            capacities: bytes that each lane's candidates may take; None for no limit.
        """
