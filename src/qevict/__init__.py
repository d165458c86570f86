"""qevict: a pluggable SDK for KV-cache compression policies on Hugging Face transformers.

Importing it does nothing and does not import transformers: ``attach``, ``Cache`` and ``Session`` resolve when touched.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from qevict import policies
from qevict.contracts.budget import Bytes, Fraction, Tokens
from qevict.policy import Policy, Tier

if TYPE_CHECKING:
    from qevict.hf import Cache, Session, attach

__version__ = version("qevict")

__all__ = ["Bytes", "Cache", "Fraction", "Policy", "Session", "Tier", "Tokens", "attach", "policies"]

_LAZY = {"attach": "qevict.hf", "Cache": "qevict.hf", "Session": "qevict.hf"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    msg = f"module 'qevict' has no attribute {name!r}"
    raise AttributeError(msg)
