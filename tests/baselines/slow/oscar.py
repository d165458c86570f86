"""OScaR (arXiv 2605.19660): keys rotated and divided by the norm of their token, then 2 bits by channel, as KIVI.

Keys are ``keys[token][channel]``, the channels of all KV heads side by side: a token has one norm.
"""

import math
from collections.abc import Callable

from tests.baselines.slow.basics import Rows, norm
from tests.baselines.slow.kivi import restored_keys

Restore = Callable[[Rows], list[list[float]]]


def hadamard(size: int) -> list[list[float]]:
    """Sylvester's matrix of a power of two, at rows of length one; it is its own inverse."""
    signs = [[(-1) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    return [[sign / math.sqrt(size) for sign in row] for row in signs]


def rotated(keys: Rows) -> list[list[float]]:
    matrix = hadamard(len(keys[0]))
    return [[math.fsum(a * b for a, b in zip(key, row, strict=True)) for row in matrix] for key in keys]


def norms(keys: Rows) -> list[float]:
    return [norm(key) for key in keys]


def by_channel(keys: Rows, bits: int = 2) -> list[list[float]]:
    """What is left of the keys when they are one group of tokens."""
    return restored_keys(keys, bits, len(keys))


def by_rotated_channel(keys: Rows, restore: Restore = by_channel) -> list[list[float]]:
    return rotated(restore(rotated(keys)))


def by_scaled_channel(keys: Rows) -> list[list[float]]:
    """Divided by the token's norm, and multiplied back."""
    lengths = norms(keys)
    units = [[number / length for number in key] for key, length in zip(keys, lengths, strict=True)]
    return [[number * length for number in key] for key, length in zip(by_channel(units), lengths, strict=True)]


def restored(keys: Rows) -> list[list[float]]:
    """The method: rotate, divide by the norms, 2 bits by channel, and all of it back."""
    return by_rotated_channel(keys, by_scaled_channel)


def errors(keys: Rows, found: Rows) -> list[float]:
    """By token, relative to its norm."""
    return [
        norm([a - b for a, b in zip(key, own, strict=True)]) / norm(key) for key, own in zip(keys, found, strict=True)
    ]
