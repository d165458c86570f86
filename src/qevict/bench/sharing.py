"""Attention masses of a recorded prompt, computed for the first policy that asks and taken by all that follow."""

from collections.abc import Callable
from typing import ClassVar

import attrs
from torch import Tensor

from qevict.backends.flash import FlashAttention
from qevict.contracts.backend import Attended, AttentionBackend, Query, View
from qevict.contracts.values import Need
from qevict.policy import Policy
from qevict.shapes import Mass, MassByQuery


@attrs.frozen(eq=False)
class SharedMasses:
    """What is known of one recorded prompt.

    Masses of a prompt depend on how it is cut into windows and on which queries count, not on what a policy makes of
    them.

    Attributes:
        layers: of the recording.
        known: masses layer by layer, by what they depend on.
    """

    layers: int
    known: dict[tuple[object, ...], list[Tensor]] = attrs.field(factory=dict)

    def give_to(self, policy: Policy) -> Policy:
        """The policy, with masses taken from an earlier one that asked for the same."""
        how = (policy.dtype, policy.sink_tokens, policy.window_tokens, policy.granularity)
        scorer = policy.scorer
        asked = (policy.backend, scorer.prompt_queries, scorer.prompt_stride, *how)
        summed, single = (self.known.setdefault((what, *asked), []) for what in ("summed", "single"))
        backend = _Remembering(policy.backend or FlashAttention(), self.layers, summed, single)
        return attrs.evolve(policy, backend=backend)


@attrs.define(eq=False)
class _Remembering(AttentionBackend):
    """Another backend; what it computes of a recorded prompt, layer by layer, it computes for the first cache only."""

    name: ClassVar[str] = "shared_masses"
    provides: ClassVar[frozenset[Need]] = frozenset(Need)
    backend: AttentionBackend
    layers: int
    summed: list[Tensor]
    single: list[Tensor]
    calls: int = 0
    single_calls: int = 0

    def attend(self, query: Query, view: View, *, want_mass: bool) -> Attended:
        return self.backend.attend(query, view, want_mass=want_mass)

    def mass(self, query: Query, view: View) -> Mass:
        layer, self.calls = self.calls, self.calls + 1
        return self._recall(self.summed, layer, lambda: self.backend.mass(query, view))

    def mass_by_query(self, query: Query, view: View) -> MassByQuery:
        layer, self.single_calls = self.single_calls, self.single_calls + 1
        return self._recall(self.single, layer, lambda: self.backend.mass_by_query(query, view))

    def _recall(self, known: list[Tensor], layer: int, compute: Callable[[], Tensor]) -> Tensor:
        if layer >= self.layers:  # the prompt is over
            return compute()
        if layer == len(known):
            known.append(compute())
        return known[layer]
