"""The ledger without a memory: what moves is encoded anew."""

from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.ledger import Ledger


@attrs.frozen
class ReEncoding(Ledger):
    """A window keeps the codes of the tier that it lives in, and no others.

    Each change of tier decodes what there is and encodes that anew, so that errors add up from move to move, and a
    demotion after a promotion is not exact; in return no byte is spent on copies. Caches that quantize again and again
    do so, such as ZipCache's (arXiv 2405.14256) at each of its intervals.
    """

    name: ClassVar[str] = "re_encoding"

    def retain(self, held: Tensor, place: Tensor, tiers: int) -> Tensor:
        """The codes of its own tier; none in full precision, and none where it is evicted."""
        return held & (torch.arange(tiers, device=held.device) == place[..., None])
