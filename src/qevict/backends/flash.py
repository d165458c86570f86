"""The flash backend: torch's fused attention over storage read in place, with window masses from its log-sum-exp."""

from typing import ClassVar

import attrs

from qevict.backends import one_token, pieces
from qevict.backends.coded import readable
from qevict.backends.fused import fused_operator
from qevict.backends.masses import Columns, masses
from qevict.backends.reference import gather_keys, masses_by_query, token_extents
from qevict.contracts.backend import Attended, AttentionBackend, Query, Setting, View
from qevict.contracts.values import ATTENDED, Need
from qevict.shapes import Mass, MassByQuery


@attrs.frozen
class FlashAttention(AttentionBackend):
    """Attends to every segment where it lies, and merges the segments by their log-sum-exp.

    Query heads that share a KV head are packed side by side, so that keys and values are read once for them all. One
    token (a decode step) is weighed by two matrix products, whose weights, one per key, give the window masses at once.
    Many tokens go through torch's fused attention, or through plain torch, some at a time, where logits are capped;
    their masses, if wanted, are a second pass over the keys alone. Sink logits are one more segment without values.
    Nothing as long as a pool is copied except what must be decoded, or cast from 16 bits to the fp32 of the arithmetic.

    Source: log-sum-exp merging as in FlashInfer (arXiv 2501.01005), section 2.2.
    """

    name: ClassVar[str] = "flash"
    provides: ClassVar[frozenset[Need]] = ATTENDED

    def reason(self, setting: Setting) -> str:
        """Which operator attends, and how codes are read."""
        operator = fused_operator(setting.device)
        fused = f"aten::{operator}" if operator else "plain torch, as this build has no fused operator for it"
        fused = fused if setting.softcap is None else "plain torch, as the fused operators do not cap logits"
        reads = [readable(keys, values, setting.window_tokens) for keys, values in setting.codecs]
        in_place = all(reads) and not setting.partial_rotary
        codes = "" if not reads else ", codes read in place" if in_place else ", codes decoded at every step"
        return f"on {setting.device.type} through {fused}{codes}"

    def attend(self, query: Query, view: View, *, want_mass: bool) -> Attended:
        """Attend in place."""
        if query.vectors.shape[3] > 1:
            attended = pieces.many_tokens(query, view)
            if not want_mass:
                return attended
            protected, mass = masses(query, _columns(view))
            return attrs.evolve(attended, mass=mass.masked_fill(view.absent[:, None], 0), protected_mass=protected)
        if not query.padded and one_token.is_even(view):
            return one_token.attend(query, view, want_mass=want_mass)
        return pieces.one_token(query, view, want_mass=want_mass)

    def mass(self, query: Query, view: View) -> Mass:
        """A second pass over the keys."""
        return masses(query, _columns(view))[1].masked_fill(view.absent[:, None], 0)

    def mass_by_query(self, query: Query, view: View) -> MassByQuery:
        """As the reference backend: the queries are few."""
        return masses_by_query(query, view)


def _columns(view: View) -> Columns:
    """The keys of a view side by side, for many queries at once; a copy."""
    positions, present = token_extents(view)
    ascending = 0 if view.encoded else view.slots.shape[1]
    return Columns(
        gather_keys(view), positions, present, view.sink_keys.shape[2], view.keys.shape[2], ascending_windows=ascending
    )
