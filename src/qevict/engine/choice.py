"""Which backend attends, and why: the policy's own, or the first that suits."""

import warnings
from collections.abc import Sequence

import attrs

from qevict.backends.flash import FlashAttention
from qevict.backends.reference import ReferenceAttention
from qevict.contracts.backend import AttentionBackend, Setting
from qevict.contracts.values import ATTENDED
from qevict.policy import Policy

BUILT_IN: tuple[AttentionBackend, ...] = (FlashAttention(),)
"""What is asked, in this order, where a policy leaves the choice open and no plugin's backend suits."""


@attrs.frozen
class Choice:
    """A backend and the reason for it.

    Attributes:
        backend: what attends.
        reason: for reports.
    """

    backend: AttentionBackend
    reason: str


def choose(policy: Policy, setting: Setting, candidates: Sequence[AttentionBackend] = BUILT_IN) -> Choice:
    """The policy's own backend; else the first candidate that has a reason and provides what the scorer needs."""
    if policy.backend is not None:
        reason = policy.backend.reason(setting)
        return Choice(policy.backend, "the policy names it" + (f", {reason}" if reason else ""))
    for backend in candidates:
        reason = _reason(backend, setting) if policy.scorer.needs & ATTENDED <= backend.provides else None
        if reason is not None:
            return Choice(backend, reason)
    return Choice(ReferenceAttention(), f"none of {', '.join(each.name for each in candidates)} suits")


def _reason(backend: AttentionBackend, setting: Setting) -> str | None:
    """What a backend says for itself; one that nobody asked for may not keep others from attending."""
    try:
        return backend.reason(setting)
    except Exception as error:  # noqa: BLE001 - whatever it does, the next one is asked
        warnings.warn(f"backend {backend.name!r} cannot say whether it suits: {error}", stacklevel=2)
        return None
