"""KIVI (arXiv 2402.02750): keys by channel over a group of tokens, values by token over a group of channels.

Vectors are ``vectors[token][channel]`` of one KV head. A constant group divides zero by zero, as in the authors'
code.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tests.baselines.slow.basics import Row, Rows


class Coded(NamedTuple):
    """A group of numbers as codes of an asymmetric grid."""

    codes: list[int]
    step: float
    low: float


def quantised(group: Row, bits: int) -> Coded:
    """From the smallest number to the largest, in as many equal steps as the bits allow; halves go to even."""
    low, high, most = min(group), max(group), 2**bits - 1
    step = (high - low) / most
    return Coded([round(min(max((number - low) / step, 0), most)) for number in group], step, low)


def restored(coded: Coded) -> list[float]:
    return [code * coded.step + coded.low for code in coded.codes]


def coded_keys(keys: Rows, bits: int, group: int) -> list[list[Coded]]:
    """By channel, then group of consecutive tokens."""
    return [in_groups(channel, bits, group) for channel in zip(*keys, strict=True)]


def coded_values(values: Rows, bits: int, group: int) -> list[list[Coded]]:
    """By token, then group of neighbouring channels."""
    return [in_groups(token, bits, group) for token in values]


def in_groups(numbers: Row, bits: int, group: int) -> list[Coded]:
    assert len(numbers) % group == 0
    return [quantised(numbers[first : first + group], bits) for first in range(0, len(numbers), group)]


def restored_keys(keys: Rows, bits: int, group: int) -> list[list[float]]:
    channels = [flat(map(restored, groups)) for groups in coded_keys(keys, bits, group)]
    return [list(token) for token in zip(*channels, strict=True)]


def restored_values(values: Rows, bits: int, group: int) -> list[list[float]]:
    return [flat(map(restored, groups)) for groups in coded_values(values, bits, group)]


def flat(parts: "map[list[float]]") -> list[float]:
    return [number for part in parts for number in part]


def packed(codes: Sequence[int], bits: int) -> list[int]:
    """Signed 32-bit words; the first of their codes lies in the lowest bits."""
    each = 32 // bits
    words = [codes[first : first + each] for first in range(0, len(codes), each)]
    return [signed(sum(code << (bits * place) for place, code in enumerate(word))) for word in words]


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


class Tokens(NamedTuple):
    """How many tokens of keys and of values are codes, and how many are in full precision."""

    key_codes: int
    key_residual: int
    value_codes: int
    value_residual: int


def after_prompt(tokens: int, residual: int) -> Tokens:
    """Keys leave in whole residuals, values all but the last ``residual``."""
    value_codes = max(tokens - residual, 0)
    return Tokens(tokens - tokens % residual, tokens % residual, value_codes, tokens - value_codes)


def after_token(held: Tokens, residual: int) -> Tokens:
    """Keys leave together where their residual is full, values one by one where theirs is too long."""
    key_codes, key_residual = held.key_codes, held.key_residual + 1
    if key_residual == residual:
        key_codes, key_residual = key_codes + residual, 0
    value_codes, value_residual = held.value_codes, held.value_residual + 1
    if value_residual > residual:
        value_codes, value_residual = value_codes + 1, value_residual - 1
    return Tokens(key_codes, key_residual, value_codes, value_residual)


def token_bytes(kv_heads: int, head_dim: int, bits: int, group: int) -> float:
    """Of keys and values of one token in one layer: codes, and two 16-bit parameters for each group."""
    return 2 * kv_heads * head_dim * (bits + 32 / group) / 8
