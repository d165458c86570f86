"""The whole extension surface: one hook for each kind of part, and one for presets.

A plugin is a module that implements some of these functions and marks each with :data:`hookimpl`; an entry
point of the group ``qevict`` names the module. No logic passes through a hook: it hands over classes or
functions, once, for look-ups by name. The name of a part is the ``name`` on its class, that of a preset the name of
its function.
"""

from collections.abc import Callable, Iterable

import pluggy

from qevict.contracts.backend import AttentionBackend
from qevict.contracts.ledger import Ledger
from qevict.contracts.quantizer import Quantizer
from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import Scorer
from qevict.contracts.store import Store
from qevict.policy import Policy

hookspec = pluggy.HookspecMarker("qevict")
hookimpl = pluggy.HookimplMarker("qevict")
"""Marks a function of a plugin as the implementation of the hook of that name."""


@hookspec
def qevict_scorers() -> Iterable[type[Scorer]]:  # type: ignore[empty-body]
    """Offer scorers: classes that say which windows matter."""


@hookspec
def qevict_quantizers() -> Iterable[type[Quantizer]]:  # type: ignore[empty-body]
    """Offer quantizers: classes that say how a tier encodes."""


@hookspec
def qevict_routers() -> Iterable[type[TierRouter]]:  # type: ignore[empty-body]
    """Offer tier routers: classes that say in which tier each window lives."""


@hookspec
def qevict_ledgers() -> Iterable[type[Ledger]]:  # type: ignore[empty-body]
    """Offer ledgers: classes that say what stays known of a window while it moves."""


@hookspec
def qevict_backends() -> Iterable[type[AttentionBackend]]:  # type: ignore[empty-body]
    """Offer attention backends: classes that attend over whatever mixture results."""


@hookspec
def qevict_stores() -> Iterable[type[Store]]:  # type: ignore[empty-body]
    """Offer stores: classes that say where bytes live."""


@hookspec
def qevict_presets() -> Iterable[Callable[..., Policy]]:  # type: ignore[empty-body]
    """Offer presets: functions that return a policy; files give their arguments by name."""
