"""The six kinds of parts, and the contract behind each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from qevict.contracts.backend import AttentionBackend
from qevict.contracts.ledger import Ledger
from qevict.contracts.quantizer import Quantizer
from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import Scorer
from qevict.contracts.store import Store

Kind = Literal["scorer", "quantizer", "router", "ledger", "backend", "store"]
"""What a part is; the word used in files, on the command line and in messages."""

Part = Scorer | Quantizer | TierRouter | Ledger | AttentionBackend | Store
"""Whatever a plugin can offer."""

CONTRACTS: Final[Mapping[Kind, type]] = MappingProxyType(
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


def hook_name(kind: Kind) -> str:
    """The hook through which parts of that kind are offered."""
    return f"qevict_{kind}s"
