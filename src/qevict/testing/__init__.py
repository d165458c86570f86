"""The contract kit: the laws of every kind of part, as tests.

Write one class for each part, and pytest collects the laws of its contract::

    class TestKeyNorm(ScorerContract):
        part = KeyNorm()

A failing test names the law, the part, and the smallest case that breaks it. A law about a capability that the part
declares to lack is skipped, with that as the reason.

Needs ``pip install "qevict[testing]"``.
"""

try:
    import hypothesis  # noqa: F401 - asked for here, so that one sentence says what is missing
    import pytest  # noqa: F401
except ImportError as error:
    raise ImportError(f'qevict.testing needs pytest and hypothesis: pip install "qevict[testing]" ({error})') from error

from qevict.testing.backend import BackendContract
from qevict.testing.contract import Contract, LawBroken
from qevict.testing.footprint import reachable_bytes, reachable_tensors
from qevict.testing.ledger import LedgerContract
from qevict.testing.operators import Operators
from qevict.testing.quantizer import QuantizerContract
from qevict.testing.rotary import RotaryContract
from qevict.testing.router import RouterContract
from qevict.testing.scorer import ScorerContract
from qevict.testing.store import StoreContract

__all__ = [
    "BackendContract",
    "Contract",
    "LawBroken",
    "LedgerContract",
    "Operators",
    "QuantizerContract",
    "RotaryContract",
    "RouterContract",
    "ScorerContract",
    "StoreContract",
    "reachable_bytes",
    "reachable_tensors",
]
