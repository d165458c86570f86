"""How much a row of the cache may hold."""

import math
import re
from typing import Any, Literal

import attrs

from qevict.errors import BudgetError

Accounting = Literal["exact", "paper"]
"""``exact`` counts every allocated byte; ``paper`` counts codes times 1.05 and nothing else (the authors' reading)."""

_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_ALLOWED = "allowed: a share such as '20 %', bytes such as '64 MiB', tokens such as '512 tokens', or None for no limit"


def _positive(_instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    if isinstance(value, bool) or not number or value <= 0:  # type: ignore[operator]
        msg = f"a budget must be positive, got {attribute.name}={value!r}; {_ALLOWED}"
        raise BudgetError(msg)


def _whole(_instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    if not isinstance(value, int):
        msg = f"a budget in bytes or tokens is a whole number, got {attribute.name}={value!r}; {_ALLOWED}"
        raise BudgetError(msg)


def _at_most_one(_instance: object, _attribute: object, value: float | int) -> None:  # noqa: PYI041 - beartype: an int is no float
    if value > 1:
        msg = f"a budget share is at most 1 (100 %), got {value!r}; for no limit use budget=None"
        raise BudgetError(msg)


@attrs.frozen
class Fraction:
    """A share of what a full cache in the stored dtype would hold for the row now.

    Args:
        share: in (0, 1].
    """

    share: float = attrs.field(validator=[_positive, _at_most_one])

    def row_bytes(self, tokens: int, token_bytes: int) -> int:
        """The bytes that a row of ``tokens`` real tokens may hold, at ``token_bytes`` per token over all layers."""
        return int(self.share * tokens * token_bytes)

    def __str__(self) -> str:
        return f"{self.share * 100:g} %"


@attrs.frozen
class Bytes:
    """An absolute number of bytes per row, over all layers."""

    count: int = attrs.field(validator=[_positive, _whole])

    def row_bytes(self, tokens: int, token_bytes: int) -> int:
        """The bytes that a row may hold, whatever its length."""
        return self.count

    def __str__(self) -> str:
        return f"{self.count} B"


@attrs.frozen
class Tokens:
    """The bytes of that many full-precision tokens per row."""

    count: int = attrs.field(validator=[_positive, _whole])

    def row_bytes(self, tokens: int, token_bytes: int) -> int:
        """The bytes that a row may hold, whatever its length."""
        return self.count * token_bytes

    def __str__(self) -> str:
        return f"{self.count} tokens"


Budget = Fraction | Bytes | Tokens


def parse_budget(text: str) -> Budget:
    """Read ``"20 %"``, ``"0.2"``, ``"64 MiB"`` or ``"512 tokens"``.

    Raises:
        BudgetError: the text is none of these, or the amount is not allowed.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*(%|[A-Za-z]*)\s*", text)
    if match is None:
        msg = f"cannot read budget {text!r}; {_ALLOWED}"
        raise BudgetError(msg)
    amount, unit = float(match[1]), match[2].lower()
    if unit not in {"%", ""} and not math.isfinite(amount * _UNITS.get(unit, 1)):
        msg = f"budget {text!r} is not a number of bytes; {_ALLOWED}"
        raise BudgetError(msg)
    if unit == "" and amount > 1:
        msg = f"budget {text!r} has no unit, and a share is at most 1: write '{match[1]} %', or a unit; {_ALLOWED}"
        raise BudgetError(msg)
    if unit in {"%", ""}:
        return Fraction(amount / 100 if unit else amount)
    if match[1].isdecimal():
        amount = int(match[1])  # a float holds 53 bits
    if unit in {"token", "tokens"}:
        return Tokens(int(amount) if amount % 1 == 0 else amount)  # type: ignore[arg-type]  # refused there
    if unit in _UNITS:
        return Bytes(int(amount * _UNITS[unit]))
    msg = f"unknown budget unit {match[2]!r} in {text!r}; {_ALLOWED}"
    raise BudgetError(msg)


def to_budget(value: "Budget | str | None") -> Budget | None:
    """Accept a budget, its text, or None.

    Raises:
        BudgetError: anything else, a bare number included, since 20 and 0.2 would both be guesses.
    """
    if value is None or isinstance(value, Budget):
        return value
    if isinstance(value, str):
        return parse_budget(value)
    msg = f"a budget is a Fraction, Bytes, Tokens or text, got {value!r}; {_ALLOWED}"
    raise BudgetError(msg)
