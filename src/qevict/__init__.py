"""qevict: a pluggable SDK for KV-cache compression policies on Hugging Face transformers.

Importing it does nothing and imports neither torch nor transformers: names resolve when they are touched.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qevict import policies as policies
    from qevict.config import dumps as dumps
    from qevict.config import load as load
    from qevict.config import loads as loads
    from qevict.contracts.budget import Bytes as Bytes
    from qevict.contracts.budget import Fraction as Fraction
    from qevict.contracts.budget import Tokens as Tokens
    from qevict.hf import Cache as Cache
    from qevict.hf import Session as Session
    from qevict.hf import attach as attach
    from qevict.policy import Policy as Policy
    from qevict.policy import Tier as Tier
    from qevict.registry import hookimpl as hookimpl

_HOMES = {
    "Bytes": "qevict.contracts.budget",
    "Cache": "qevict.hf",
    "Fraction": "qevict.contracts.budget",
    "Policy": "qevict.policy",
    "Session": "qevict.hf",
    "Tier": "qevict.policy",
    "Tokens": "qevict.contracts.budget",
    "attach": "qevict.hf",
    "dumps": "qevict.config",
    "hookimpl": "qevict.registry",
    "load": "qevict.config",
    "loads": "qevict.config",
}

__all__ = [*sorted(_HOMES), "policies"]  # noqa: PLE0604 - the keys are the names


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        return import_module("qevict.version").own_version()
    if name == "policies":
        return import_module("qevict.policies")
    msg = f"module 'qevict' has no attribute {name!r}"
    raise AttributeError(msg)
