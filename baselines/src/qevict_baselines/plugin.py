"""What this distribution offers, by the hooks of qevict."""

from collections.abc import Callable, Iterable

from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import Scorer
from qevict.policy import Policy
from qevict.registry import hookimpl


@hookimpl
def qevict_scorers() -> Iterable[type[Scorer]]:
    """Scorers that papers add."""
    return []


@hookimpl
def qevict_routers() -> Iterable[type[TierRouter]]:
    """Routers that papers add."""
    return []


@hookimpl
def qevict_presets() -> Iterable[Callable[..., Policy]]:
    """Each paper's method as a whole."""
    return []
