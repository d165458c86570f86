"""DefensiveKV (arXiv 2510.13334): the worst case over queries and heads, never below the head's mean risk.

``prefix[query_head][query][key]`` is the attention of the observation window on the tokens before it.
"""

import math
from fractions import Fraction
from itertools import accumulate

from tests.baselines.slow.basics import (
    Attention,
    Order,
    Row,
    Rows,
    average_pool,
    earlier_first,
    group_mean,
    groups,
    highest,
    mean,
    over_queries,
    ranked,
    top_flat,
    top_over_layers,
    with_window,
)


def smoothed(row: Row, kernel: int) -> list[float]:
    """Average-pooled, with the mass that the row had."""
    pooled = average_pool(row, kernel)
    mass, left = math.fsum(row), math.fsum(pooled)
    return [value * mass / left for value in pooled]


def worst(prefix: Attention, kv_heads: int, kernel: int) -> list[list[float]]:
    """Step 2 and the first half of 3: the maximum over a group's query heads and queries, of smoothed rows."""
    return [
        [max(column) for column in zip(*(smoothed(row, kernel) for rows in group for row in rows), strict=True)]
        for group in groups(prefix, kv_heads)
    ]


def risks(prefix: Attention, kv_heads: int, kernel: int) -> list[list[float]]:
    """Step 3: the worst case, or the head's mean worst case where that is more."""
    return [[max(value, mean(row)) for value in row] for row in worst(prefix, kv_heads, kernel)]


def shares(norms: Rows) -> list[list[float]]:
    """Step 4: each norm as a share of the sum over the heads at the same token."""
    totals = [math.fsum(column) for column in zip(*norms, strict=True)]
    return [[value / total for value, total in zip(row, totals, strict=True)] for row in norms]


def bias_of_last_prefix(prefix: Attention, window: int) -> float:
    """What the authors' code subtracts: mean mass on the last tokens before the window, as many as the window has."""
    return mean([math.fsum(row[-window:]) for rows in prefix for row in rows])


def bias_of_window(prefix: Attention) -> float:
    """What was probably meant: mean mass on the window, the rest of each row."""
    return mean([1 - math.fsum(row) for rows in prefix for row in rows])


def cap(prefix: int, share: Fraction, window: int) -> int:
    """At most this many tokens per head in the first stage.

    In the authors' code it turns negative for a small ``share`` and then, as the end of a slice, selects nearly every
    token. Here it ends at zero.
    """
    return max(int(prefix * share - window), 0)


def first_stage(prefix: Attention, kv_heads: int, bias: float, most: int) -> list[list[int]]:
    """Per head: the tokens of the highest mean attention that stay below 0.9 - ``bias`` of its mass, at most ``most``.

    The token that crosses the threshold is not among them.
    """
    stages = []
    for row in group_mean(over_queries(prefix), kv_heads):
        best = ranked(row)
        masses = accumulate(row[at] / math.fsum(row) for at in best)
        below = [at for at, mass in zip(best, masses, strict=True) if mass < 0.9 - bias]
        stages.append(sorted(below[:most]))
    return stages


def scores(prefix: Attention, norms: Rows, kernel: int, window: int, share: Fraction, bias: float) -> list[list[float]]:
    """Steps 1 to 4. ``norms[kv_head]`` of the prefix; ``share`` is kept. The first stage gets the layer's maximum."""
    kv_heads = len(norms)
    weighted = [
        [risk * part for risk, part in zip(*pair, strict=True)]
        for pair in zip(risks(prefix, kv_heads, kernel), shares(norms), strict=True)
    ]
    stages = first_stage(prefix, kv_heads, bias, cap(len(norms[0]), share, window))
    most = highest(weighted)
    return [
        [most if at in stage else value for at, value in enumerate(row)]
        for row, stage in zip(weighted, stages, strict=True)
    ]


def kept(scores: Rows, window: int, share: Fraction, order: Order = earlier_first) -> list[list[int]]:
    """Step 5: the window gets the layer's maximum, and the best of all heads stay. No floor."""
    rows = with_window(scores, window, highest(scores))
    return top_flat(rows, int(len(rows[0]) * share * len(rows)), order)


def kept_over_layers(
    layers: Attention, window: int, share: Fraction, order: Order = earlier_first
) -> list[list[list[int]]]:
    """Layer-DefensiveKV: ``layers[layer]`` are scores; each window gets its layer's maximum, and all layers compete.

    So a layer of low risk can lose tokens of its window, or all tokens of a head.
    """
    rows = [with_window(scores, window, highest(scores)) for scores in layers]
    return top_over_layers(rows, int(len(rows[0][0]) * share * len(rows[0]) * len(rows)), order)
