"""Validators of the numbers that scorers are made with."""

from collections.abc import Callable

import attrs

from qevict.errors import PolicyError


def at_least_one(_instance: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    """A whole number of at least 1.

    Raises:
        PolicyError: it is something else.
    """
    if not _is_count(value):
        msg = f"{attribute.name} is a whole number of at least 1, got {value!r}"
        raise PolicyError(msg)


def at_least_one_or_none(_instance: object, attribute: "attrs.Attribute[int | None]", value: int | None) -> None:
    """A whole number of at least 1, or None for all.

    Raises:
        PolicyError: it is something else.
    """
    if value is not None and not _is_count(value):
        msg = f"{attribute.name} is None (all) or at least 1, got {value!r}"
        raise PolicyError(msg)


def none_or_more(_instance: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    """A whole number of at least 0.

    Raises:
        PolicyError: it is something else.
    """
    if value != 0 and not _is_count(value):
        msg = f"{attribute.name} is a whole number of at least 0, got {value!r}"
        raise PolicyError(msg)


def one_of(*allowed: str) -> Callable[[object, "attrs.Attribute[str]", str], None]:
    """One of these words."""

    def check(_instance: object, attribute: "attrs.Attribute[str]", value: str) -> None:
        if value not in allowed:
            msg = f"{attribute.name} is one of {', '.join(map(repr, allowed))}, got {value!r}"
            raise PolicyError(msg)

    return check


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
