"""What plugins offer: the six kinds of parts, with the contract behind each, and presets."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal

from qevict.contracts.backend import AttentionBackend
from qevict.contracts.ledger import Ledger
from qevict.contracts.quantizer import Quantizer
from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import Scorer
from qevict.contracts.store import Store
from qevict.policy import Policy

PartKind = Literal["scorer", "quantizer", "router", "ledger", "backend", "store"]
"""What a part is; the word used in files, on the command line and in messages."""

Kind = PartKind | Literal["preset"]
"""What is offered: a part, or a preset."""

Part = Scorer | Quantizer | TierRouter | Ledger | AttentionBackend | Store
"""An instance of what is offered as a part."""

Preset = Callable[..., Policy]
"""A function that returns a policy; its name is ``__name__``, and each of its arguments can be given by name."""

Offered = type | Preset
"""What a hook hands over: the class of a part, or a preset."""

CONTRACTS: Final[Mapping[PartKind, type]] = MappingProxyType(
    {
        "scorer": Scorer,
        "quantizer": Quantizer,
        "router": TierRouter,
        "ledger": Ledger,
        "backend": AttentionBackend,
        "store": Store,
    }
)
"""The abstract class that every part of a kind derives from."""

KINDS: Final[tuple[Kind, ...]] = (*CONTRACTS, "preset")
"""Every kind, in the order of listings."""


def hook_name(kind: Kind) -> str:
    """The hook through which that kind is offered."""
    return f"qevict_{kind}s"


def hook_of(part: type) -> str | None:
    """The hook through which a class is offered; None if it is no part."""
    return next((hook_name(kind) for kind, contract in CONTRACTS.items() if issubclass(part, contract)), None)


def path_of(offered: Offered) -> str:
    """A class or function, with its module."""
    return f"{offered.__module__}.{offered.__qualname__}"
