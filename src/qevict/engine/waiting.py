"""What of a prompt's pieces waits for its end."""

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Asked:
    """Queries of a prompt's pieces that wait for its end.

    Attributes:
        vectors: ``[lanes, heads, group, queries, head_dim]``.
        positions: ``[lanes, queries]``.
    """

    vectors: Tensor
    positions: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.vectors.nbytes + self.positions.nbytes

    def until(self, lengths: Tensor) -> "Asked":
        """What is left of them in lanes cut to these lengths; the others mean nothing any more."""
        return attrs.evolve(self, positions=torch.where(self.positions < lengths[:, None], self.positions, -1))
