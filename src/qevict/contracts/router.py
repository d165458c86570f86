"""The tier router: in which tier each window lives."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import attrs
from torch import Tensor

from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Costs, Geometry, MovePlan, Windows

Scope = Literal["lane", "layer", "model"]
"""Who shares bytes: nobody, the lanes of a row in one layer, or the lanes of a row in all layers."""


@attrs.frozen
class LayerBounds:
    """What one layer of a row takes at least and at most.

    Attributes:
        least_bytes: with nothing but what no router sees: sinks, windows not ranked yet, bookkeeping.
        most_bytes: with everything in the hottest tier.
    """

    least_bytes: int
    most_bytes: int


class TierRouter(ABC):
    """Says in which tier each window lives. A frozen value, and the only part that sees budgets.

    Laws:
        * Pure: equal input, equal plan.
        * Every window in exactly one place: a tier, or evicted. Protected and absent windows keep the place they have.
        * The planned bytes of the lanes that share are together at most their capacities, as long as the codes that
          their windows already keep in a tier fit that tier's part of it (they do: capacities never shrink).
        * Rows are strangers, and so are lanes that do not share.
        * Of two windows of a lane with equal scores the earlier position wins, unless :attr:`earlier_wins` is False.
        * No host synchronisation.

    Attributes:
        name: the name in files and on the command line.
        scope: which lanes share their capacities. With ``"model"`` all layers wait for the last one with their prompt
            uncompressed.
        rankings: names of the rankings that :meth:`plan` reads; the scorer must offer them all.
        earlier_wins: of two windows with equal scores the earlier position wins. False for a router that prefers late
            positions.
    """

    name: ClassVar[str]
    scope: Scope = "lane"
    rankings: tuple[str, ...] = (IMPORTANCE,)
    earlier_wins: bool = True

    def share(self, total_bytes: int, geometry: Geometry, bounds: LayerBounds) -> tuple[int, ...]:
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

        Lanes are those of one layer, or of several layers, one after another (``windows.layers``); with scope
        ``"model"`` always of all layers.

        Args:
            rankings: from the scorer, ``[lanes, windows]`` each.
            windows: what is to be placed.
            costs: bytes by tier.
            capacities: bytes that each lane's candidates may take; None for no limit.
        """
