"""KVQuant (arXiv 2401.18079): non-uniform levels, one codebook for the keys of a layer and one for its values.

Vectors are ``vectors[token][channel]``, the channels of all KV heads side by side. Keys are taken before RoPE.
"""

import itertools
import math
from typing import NamedTuple

from tests.baselines.slow.basics import Row, Rows


class Clusters(NamedTuple):
    """Cluster centres, ascending, and the weighted sum of squared distances to them."""

    means: list[float]
    cost: float


def weighted_means(numbers: Row, weights: Row, count: int) -> Clusters:
    """The best of all ways to cut the sorted numbers into ``count`` stretches."""
    pairs = sorted(zip(numbers, weights, strict=True))
    every = itertools.combinations(range(1, len(pairs)), count - 1)
    return min((clusters(pairs, (0, *cuts, len(pairs))) for cuts in every), key=lambda found: found.cost)


def clusters(pairs: list[tuple[float, float]], ends: tuple[int, ...]) -> Clusters:
    stretches = [pairs[first:last] for first, last in itertools.pairwise(ends)]
    means = [weighted_mean(stretch) for stretch in stretches]
    cost = math.fsum(
        weight * (number - mean) ** 2
        for stretch, mean in zip(stretches, means, strict=True)
        for number, weight in stretch
    )
    return Clusters(means, cost)


def weighted_mean(pairs: list[tuple[float, float]]) -> float:
    return math.fsum(number * weight for number, weight in pairs) / math.fsum(weight for _, weight in pairs)


def quantile(numbers: Row, part: float) -> float:
    """Interpolated between the two sorted numbers that it falls between."""
    ordered = sorted(numbers)
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def thresholds(numbers: Row, outliers: float) -> tuple[float, float]:
    """What half of the outliers lies below, and half above."""
    return quantile(numbers, outliers / 2), quantile(numbers, 1 - outliers / 2)


class Nuq(NamedTuple):
    """Numbers as the nearest of some levels; those outside the range are outliers, kept as they are."""

    codes: list[int]
    outliers: list[bool]
    restored: list[float]


def nuq(numbers: Row, outliers: list[bool], low: float, high: float, levels: Row) -> Nuq:
    """The range is stretched to [-1, 1]; an outlier counts as the middle, and its code means nothing."""
    centre, half = (high + low) / 2, (high - low) / 2
    codes = [
        nearest(0.0 if outlier else (number - centre) / half, levels)
        for number, outlier in zip(numbers, outliers, strict=True)
    ]
    restored = [
        number if outlier else levels[code] * half + centre
        for number, outlier, code in zip(numbers, outliers, codes, strict=True)
    ]
    return Nuq(codes, outliers, restored)


def nearest(number: float, levels: Row) -> int:
    """The first of the nearest."""
    return min(range(len(levels)), key=lambda code: abs(number - levels[code]))


def key_channel(numbers: Row, low: float, high: float, levels: Row) -> Nuq:
    """One channel over the tokens, in a range that was calibrated; on its edge a number is no outlier."""
    return nuq(numbers, [number < low or number > high for number in numbers], low, high, levels)


def value_token(numbers: Row, outliers: float, levels: Row) -> Nuq:
    """One token over the channels of all KV heads, in its own range; the quantiles themselves are outliers."""
    beyond, low, high = value_range(numbers, outliers)
    return nuq(numbers, beyond, low, high, levels)


def value_range(numbers: Row, outliers: float) -> tuple[list[bool], float, float]:
    """The outliers of a token, and the range of the rest."""
    lower, upper = thresholds(numbers, outliers)
    beyond = [number <= lower or number >= upper for number in numbers]
    rest = [number for number, outlier in zip(numbers, beyond, strict=True) if not outlier]
    return beyond, min(rest), max(rest)


def key_levels(keys: Rows, fisher: Rows, outliers: float, bits: int) -> list[float]:
    """Levels of a layer's keys: numbers within the range of their channel, stretched, weighted by the Fisher diagonal.

    ``fisher[token][channel]``: squares of the loss's derivatives by the keys.
    """
    numbers: list[float] = []
    weights: list[float] = []
    for channel, own in zip(zip(*keys, strict=True), zip(*fisher, strict=True), strict=True):
        low, high = thresholds(channel, outliers)
        add_stretched(numbers, weights, channel, own, (low, high))
    return weighted_means(numbers, weights, 2**bits).means


def value_levels(values: Rows, fisher: Rows, outliers: float, bits: int) -> list[float]:
    """Levels of a layer's values: likewise, in the range of their token."""
    numbers: list[float] = []
    weights: list[float] = []
    for token, own in zip(values, fisher, strict=True):
        _, low, high = value_range(token, outliers)
        add_stretched(numbers, weights, token, own, (low, high))
    return weighted_means(numbers, weights, 2**bits).means


def add_stretched(numbers: list[float], weights: list[float], line: Row, own: Row, within: tuple[float, float]) -> None:
    low, high = within
    for number, weight in zip(line, own, strict=True):
        if low <= number <= high:
            numbers.append((number - (high + low) / 2) / ((high - low) / 2))
            weights.append(weight)


def bits_per_number(bits: int, channels: int, outliers: float = 0.01) -> float:
    """Mean of keys and values: codes, an outlier's value and index at 16 bits each, a 32-bit pointer for each token.

    Values store their range besides, two numbers of 16 bits for each token.
    """
    keys = bits + outliers * 32 + 32 / channels
    return (keys + keys + 32 / channels) / 2
