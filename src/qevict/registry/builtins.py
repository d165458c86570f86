"""The built-in parts and presets. They come through the same hooks as everybody else's."""
# ruff: noqa: PLC0415 - a part is imported when parts are asked for, not when a plugin imports `hookimpl`

from collections.abc import Callable, Iterable

from qevict.contracts.backend import AttentionBackend
from qevict.contracts.ledger import Ledger
from qevict.contracts.quantizer import Quantizer
from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import Scorer
from qevict.contracts.store import Store
from qevict.policy import Policy
from qevict.registry.hookspecs import hookimpl


@hookimpl
def qevict_scorers() -> Iterable[type[Scorer]]:
    """Accumulated attention, and recency."""
    from qevict.scorers.cumulative import CumulativeAttention
    from qevict.scorers.recency import Recency

    return [CumulativeAttention, Recency]


@hookimpl
def qevict_quantizers() -> Iterable[type[Quantizer]]:
    """Affine grids over channels and over tokens."""
    from qevict.quantizers.affine import PerChannel, PerToken

    return [PerChannel, PerToken]


@hookimpl
def qevict_routers() -> Iterable[type[TierRouter]]:
    """Hottest tier first, in bytes."""
    from qevict.routers.covering import CoverFirst
    from qevict.routers.greedy import GreedyTiers

    return [CoverFirst, GreedyTiers]


@hookimpl
def qevict_ledgers() -> Iterable[type[Ledger]]:
    """Codes that outlive a promotion, and codes that do not."""
    from qevict.ledgers.migration_stable import MigrationStable
    from qevict.ledgers.re_encoding import ReEncoding

    return [MigrationStable, ReEncoding]


@hookimpl
def qevict_backends() -> Iterable[type[AttentionBackend]]:
    """Fused attention over storage in place, and plain attention over decoded windows."""
    from qevict.backends.flash import FlashAttention
    from qevict.backends.reference import ReferenceAttention

    return [ReferenceAttention, FlashAttention]


@hookimpl
def qevict_stores() -> Iterable[type[Store]]:
    """The memory of the model's device."""
    from qevict.stores.memory import DeviceMemory

    return [DeviceMemory]


@hookimpl
def qevict_presets() -> Iterable[Callable[..., Policy]]:
    """Compositions of the built-in parts."""
    from qevict.policies import PRESETS

    return PRESETS.values()
