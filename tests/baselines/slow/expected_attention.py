"""Expected attention (arXiv 2510.00636): the attention that later queries are expected to pay, queries being Gaussian.

The public form, kvpress: queries before RoPE, without those of the sinks, give a mean and a covariance per query head.
Both are turned by the mean rotation of the positions to come. For a Gaussian query the expected exponential is
exp(k.mean / sqrt(d) + k'.covariance.k / 2d). It is normalised over the keys, averaged over the group, and weighted by
the L2 norm of the value.
"""

import math
from collections.abc import Sequence

from tests.baselines.slow.basics import Attention, Row, Rows, dot, group_mean, highest, mean, norm, softmax

FUTURE = 512
SINKS = 4


def moments(queries: Rows) -> tuple[list[float], list[list[float]]]:
    """Mean and covariance (over their number, not one less) of one head's queries."""
    centre = [mean(column) for column in zip(*queries, strict=True)]
    columns = [
        [value - middle for value in column] for column, middle in zip(zip(*queries, strict=True), centre, strict=True)
    ]
    return centre, [[dot(left, right) / len(queries) for right in columns] for left in columns]


def mean_rotation(frequencies: Row, positions: Sequence[int]) -> list[list[float]]:
    """Mean of the RoPE matrices at ``positions``; channel i turns with channel i + d/2 at ``frequencies[i]``."""
    half = len(frequencies)
    matrix = [[0.0] * (2 * half) for _ in range(2 * half)]
    for at, frequency in enumerate(frequencies):
        cosine = mean([math.cos(position * frequency) for position in positions])
        sine = mean([math.sin(position * frequency) for position in positions])
        matrix[at][at] = matrix[at + half][at + half] = cosine
        matrix[at][at + half], matrix[at + half][at] = -sine, sine
    return matrix


def logit(key: Row, centre: Row, covariance: Rows) -> float:
    """Logarithm of the expected exponential of one key's attention logit."""
    spread = dot(key, [dot(row, key) for row in covariance])
    return dot(key, centre) / math.sqrt(len(key)) + spread / len(key) / 2


def expected(queries: Rows, keys: Rows, rotation: Rows) -> list[float]:
    """One query head: expected attention on ``keys``, which are rotated; ``queries`` are not."""
    centre, covariance = moments(queries)
    turned = [dot(row, centre) for row in rotation]
    half = [[dot(row, column) for column in zip(*covariance, strict=True)] for row in rotation]
    both = [[dot(row, other) for other in rotation] for row in half]
    return softmax([logit(key, turned, both) for key in keys])


def without_spread(queries: Rows, keys: Rows, rotation: Rows) -> list[float]:
    """The option without covariance: attention of the mean query."""
    centre, _ = moments(queries)
    turned = [dot(row, centre) for row in rotation]
    return softmax([dot(key, turned) / math.sqrt(len(key)) for key in keys])


def weighted(attention: Rows, values: Attention, epsilon: float = 0.0) -> list[list[float]]:
    """Per KV head: (attention + epsilon) times the norm of the value."""
    return [
        [(score + epsilon) * norm(value) for score, value in zip(row, own, strict=True)]
        for row, own in zip(attention, values, strict=True)
    ]


def scores(
    queries: Attention,
    keys: Attention,
    values: Attention,
    frequencies: Row,
    sinks: int = SINKS,
    future: int = FUTURE,
    epsilon: float = 0.0,
) -> list[list[float]]:
    """All of a prompt, per KV head: ``queries`` before RoPE, ``keys`` after. Sinks get the highest score there is."""
    length, kv_heads = len(keys[0]), len(keys)
    rotation = mean_rotation(frequencies, range(length, length + future))
    size = len(queries) // kv_heads
    rows = [expected(own[sinks:], keys[head // size][sinks:], rotation) for head, own in enumerate(queries)]
    result = weighted(group_mean(rows, kv_heads), [own[sinks:] for own in values], epsilon)
    most = highest(result)
    return [[*[most] * sinks, *row] for row in result]
