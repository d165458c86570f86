"""The names under which attention and masks are registered."""

BASES = {"qevict_sdpa": "sdpa", "qevict_eager": "eager"}
"""Registered name by the model's own implementation, whose masks and bits it reproduces.

A name must hold neither "flash" nor "/": transformers would take it for a flash or hub kernel.
"""


def name_for(base: str) -> str | None:
    """The name that stands in for an implementation; None where there is none."""
    return next((name for name, own in BASES.items() if base in {own, name}), None)
