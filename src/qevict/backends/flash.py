"""The flash backend: torch's fused attention over storage read in place, with window masses from its log-sum-exp."""

from typing import ClassVar

import attrs

from qevict.backends import one_token, pieces
from qevict.backends.reference import ReferenceAttention
from qevict.contracts.backend import Attended, AttentionBackend, Query, View
from qevict.contracts.values import Need
from qevict.shapes import Mass


@attrs.frozen
class FlashAttention(AttentionBackend):
    """Attends to every segment where it lies, and merges the segments by their log-sum-exp.

    Query heads that share a KV head are packed side by side, so that keys and values are read once for them all. One
    token (a decode step) is weighed by two matrix products, whose weights, one per key, give the window masses at once.
    Many tokens go through torch's fused attention; their masses, if wanted, are a second pass over the keys alone.
    Nothing as long as a pool is copied except what must be decoded, or cast from 16 bits to the fp32 of the arithmetic.

    Source: log-sum-exp merging as in FlashInfer (arXiv 2501.01005), section 2.2.
    """

    name: ClassVar[str] = "flash"
    provides: ClassVar[frozenset[Need]] = frozenset({Need.MASS, Need.KEYS, Need.VALUES})

    def attend(self, query: Query, view: View, *, want_mass: bool) -> Attended:
        """Attend in place."""
        if query.vectors.shape[3] > 1:
            attended = pieces.many_tokens(query, view)
            return self._with_masses(attended, query, view) if want_mass else attended
        if not query.padded and one_token.is_even(view):
            return one_token.attend(query, view, want_mass=want_mass)
        return pieces.one_token(query, view, want_mass=want_mass)

    def mass(self, query: Query, view: View) -> Mass:
        """A second pass over the keys."""
        return ReferenceAttention().mass(query, view)

    def _with_masses(self, attended: Attended, query: Query, view: View) -> Attended:
        """What windows do not get, the sinks get; pads give nothing to either."""
        mass = self.mass(query, view)
        asked = (query.positions >= 0).sum(1, keepdim=True)
        return attrs.evolve(attended, mass=mass, protected_mass=(asked - mass.sum(-1)).clamp(min=0))
