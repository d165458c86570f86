"""QEvict's ledger: quantise once, remember for good."""

from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.ledger import Ledger


@attrs.frozen
class MigrationStable(Ledger):
    """A window is encoded at its first demotion and keeps these codes through every later move.

    A promoted window holds the decoded values in full precision *and* its codes, so that a later demotion is exact and
    costs nothing; the price is counted (full precision + codes). QEvict (arXiv 2608.05326), algorithm 1, lines 9-14.
    """

    name: ClassVar[str] = "migration_stable"

    def retain(self, held: Tensor, place: Tensor, tiers: int) -> Tensor:
        """The codes of its own tier and of colder ones; codes finer than a window's tier would defeat the demotion."""
        tier = torch.arange(tiers, device=held.device)
        return held & (tier >= place.clamp(min=0)[..., None])
