"""ZipCache (arXiv 2405.14256): 4 bits for salient tokens, 2 for the others; saliency by a few probe queries.

Attention is ``attention[query][key]`` of one head, zero where masked. Vectors are ``vectors[token][channel]``, the
channels of all KV heads side by side.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from tests.baselines.slow import kivi
from tests.baselines.slow.basics import Attention, Row, Rows


def accumulated(rows: Rows) -> list[float]:
    """What each key got from all queries; early keys are seen by more of them."""
    return [math.fsum(column) for column in zip(*rows, strict=True)]


def normalised(rows: Rows) -> list[float]:
    """What each key got from a query that sees it, on average."""
    return [math.fsum(column) / max(sum(weight > 0 for weight in column), 1) for column in zip(*rows, strict=True)]


def probed(attention: Rows, probes: Sequence[int]) -> list[float]:
    """The paper: likewise, of the probe queries alone."""
    return normalised([attention[query] for query in probes])


def probed_by_code(attention: Rows, probes: Sequence[int]) -> list[float]:
    """The authors' code: the probes' sums over the number of all queries that see the key."""
    sums = accumulated([attention[query] for query in probes])
    return [own / (len(sums) - key) for key, own in enumerate(sums)]


def of_group(heads: Attention, probes: Sequence[int]) -> list[float]:
    """Saliency for one KV head: the sum over the query heads that share it."""
    return [math.fsum(column) for column in zip(*(probed(rows, probes) for rows in heads), strict=True)]


def ranked(scores: Row) -> list[int]:
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


def others(scores: Row, share: Fraction) -> list[int]:
    """Tokens that get the fewer bits: the lowest ``int((1 - share) * tokens)``; the lowest come first."""
    count = int((1 - share) * len(scores))
    return sorted(sorted(range(len(scores)), key=lambda token: (scores[token], token))[:count])


def channel_scales(values: Rows) -> list[float]:
    """By channel, the root of its largest magnitude."""
    return [math.sqrt(max(map(abs, column))) for column in zip(*values, strict=True)]


def divided(values: Rows, scales: Row) -> list[list[float]]:
    return [[number / scale for number, scale in zip(token, scales, strict=True)] for token in values]


class CodedValues(NamedTuple):
    """Values by token, each over all channels, after each channel was divided by its scale."""

    scales: list[float]
    tokens: list[kivi.Coded]


def coded_values(values: Rows, bits: int) -> CodedValues:
    scales = channel_scales(values)
    return CodedValues(scales, [kivi.quantised(token, bits) for token in divided(values, scales)])


def restored_values(coded: CodedValues) -> list[list[float]]:
    return [
        [number * scale for number, scale in zip(kivi.restored(token), coded.scales, strict=True)]
        for token in coded.tokens
    ]


def coded_keys(keys: Rows, bits: int) -> list[kivi.Coded]:
    """Keys by channel, over all tokens that get as many bits."""
    return [kivi.quantised(channel, bits) for channel in zip(*keys, strict=True)]


def packed(codes: Sequence[int], bits: int) -> list[int]:
    """Bytes; a byte holds a code of each half, or quarter, of the channels, not neighbours."""
    parts = 8 // bits
    size = len(codes) // parts
    return [sum(codes[at + part * size] << (bits * part) for part in range(parts)) for at in range(size)]


def code_bits(share: float) -> float:
    return 4 * share + 2 * (1 - share)


def token_bytes(kv_heads: int, head_dim: int, tokens: int, share: float) -> float:
    """Of keys and values of one token in one layer, at 16-bit parameters; lists of who is salient are not counted."""
    channels = kv_heads * head_dim
    codes = 2 * code_bits(share) / 8 * channels * tokens
    of_keys = 2 * 2 * channels * 2  # low and step of each channel, for either kind of token
    of_values = channels * 2 + 2 * tokens * 2  # a scale for each channel, low and step of each token
    return (codes + of_keys + of_values) / tokens
