"""The ledger: what stays known of a window while it moves."""

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Bool, Int
from torch import Tensor


class Ledger(ABC):
    """Rules what the engine remembers of a window across moves: above all, which codes outlive a promotion.

    The memory itself (identity, place, slots, scorer state, count of moves) is the engine's table of records; its
    bytes are counted and reported. A ledger is the frozen rule over it.

    Laws:
        * Pure, and no host synchronisation.
        * Only codes that a window holds can be retained; an evicted window retains none.
        * A window always retains the codes of the tier that it lives in.
        * What is retained is billed: the router plans with the cost of the copies.
    """

    name: ClassVar[str]

    @abstractmethod
    def retain(
        self, held: Bool[Tensor, "*windows tiers"], place: Int[Tensor, "*windows"], tiers: int
    ) -> Bool[Tensor, "*windows tiers"]:
        """Which of the codes held by a window stay when it takes ``place``.

        Args:
            held: whether the window owns codes of each tier (False for tiers without a quantizer).
            place: the tier that it is put into; ``tiers`` for eviction, ``PROTECTED`` (-1) for one that has not aged.
            tiers: number of tiers.
        """
