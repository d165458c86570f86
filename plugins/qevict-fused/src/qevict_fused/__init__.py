"""Decode attention over full precision and codes in one operator, for processors."""

from collections.abc import Iterable

from qevict.contracts.backend import AttentionBackend
from qevict.registry import hookimpl
from qevict_fused.backend import FusedAttention

__all__ = ["FusedAttention", "qevict_backends"]


@hookimpl
def qevict_backends() -> Iterable[type[AttentionBackend]]:
    """One backend."""
    return [FusedAttention]
