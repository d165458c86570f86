"""Parts that break a law on purpose, and what the kit says of them."""

from typing import Any

import attrs
import pytest

from qevict.testing import Contract, LawBroken

SHARED = {"test_it_is_a_frozen_value", "test_the_registry_takes_it"}
"""Laws of all kinds; proven once."""


@attrs.frozen
class Break:
    """A broken part.

    Attributes:
        law: the test that must fail.
        part: what is broken.
        says: what the report must say, beside the law and the part.
    """

    law: str
    part: Any
    says: str = ""

    def __str__(self) -> str:
        pool = getattr(self.part, "pool", type(self.part))
        return f"{self.law.removeprefix('test_')}-{pool.__name__}"


def breaks(*each: Break) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("broken", each, ids=str)


def report(contract: type[Contract[Any, Any]], broken: Break) -> str:
    """What the kit says; it names the law, the part and, where there are cases, the smallest."""
    judged = type("Judged", (contract,), {"part": broken.part})()
    with pytest.raises(LawBroken) as caught:
        getattr(judged, broken.law)()
    text = str(caught.value)
    assert text.startswith(f"{broken.part!r} breaks a law of its contract\n  law: ")
    assert broken.says in text
    return text


def laws_of(contract: type[Contract[Any, Any]]) -> set[str]:
    return {name for name in dir(contract) if name.startswith("test_")} - SHARED


def passes(contract: type[Contract[Any, Any]], part: Any, law: str) -> None:
    """Run one law on a part that keeps it; what is skipped raises."""
    getattr(type("Judged", (contract,), {"part": part})(), law)()
