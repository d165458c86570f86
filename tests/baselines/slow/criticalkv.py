"""CriticalKV (arXiv 2502.03805): half by the score, the rest by the score times the norm of the projected value."""

import math
from fractions import Fraction

from tests.baselines.slow.adakv import floored
from tests.baselines.slow.basics import (
    Attention,
    Order,
    Row,
    Rows,
    dot,
    earlier_first,
    group_mean,
    highest,
    top,
    top_flat,
    with_window,
)

HALF = Fraction(1, 2)
EPSILON = 1e-4


def projected_norms(values: Attention, projection: Rows) -> list[list[float]]:
    """L1 norm of ``values[kv_head][token]`` through each query head's columns of ``projection[hidden]``, group mean."""
    size = len(values[0][0])
    heads = len(projection[0]) // size
    per_head = []
    for head in range(heads):
        slices = [row[head * size : (head + 1) * size] for row in projection]
        own = values[head * len(values) // heads]
        per_head.append([math.fsum(abs(dot(value, part)) for part in slices) for value in own])
    return group_mean(per_head, len(values))


def chosen(scores: Row, norms: Row, budget: int, first: int, epsilon: float = EPSILON) -> list[int]:
    """One head: the best ``first`` by the score, then by the score times the norm up to ``budget``."""
    stage = top(scores, first)
    weighted = [(score + epsilon) * size for score, size in zip(scores, norms, strict=True)]
    return top([math.inf if at in stage else score for at, score in enumerate(weighted)], budget)


def kept(
    scores: Rows, norms: Rows, window: int, keep: int, alpha: Fraction = HALF, epsilon: float = EPSILON
) -> list[list[int]]:
    """The paper's form: both stages share the budget before the window; ``scores`` and ``norms`` of the prefix."""
    budgets = [keep - window] * len(scores)
    return kept_within(scores, norms, window, budgets, alpha, epsilon)


def kept_within(
    scores: Rows, norms: Rows, window: int, budgets: list[int], alpha: Fraction = HALF, epsilon: float = EPSILON
) -> list[list[int]]:
    """Both stages in each head's own budget before the window, as from AdaKV."""
    tail = list(range(len(scores[0]), len(scores[0]) + window))
    return [
        chosen(row, own, budget, int(budget * alpha), epsilon) + tail
        for row, own, budget in zip(scores, norms, budgets, strict=True)
    ]


def kept_ranked(
    scores: Rows, norms: Rows, window: int, keep: int, alpha: Fraction = HALF, epsilon: float = EPSILON
) -> list[list[int]]:
    """The form of kvpress: the window ranks first and uses up the first stage. ``norms`` cover the window as well."""
    rows = with_window(scores, window, highest(scores) + 1)
    first = int(keep * alpha)
    return [chosen(row, own, keep, first, epsilon) for row, own in zip(rows, norms, strict=True)]


def kept_ranked_floored(
    scores: Rows,
    norms: Rows,
    window: int,
    keep: int,
    floor: float | Fraction = Fraction(1, 5),
    alpha: Fraction = HALF,
    order: Order = earlier_first,
) -> list[list[int]]:
    """The form of kvpress under AdaKV: heads' budgets with a floor, then both stages; the window is ranked along."""
    rows = floored(with_window(scores, window, highest(scores) + 1), int(keep * floor))
    budgets = [len(head) for head in top_flat(rows, len(rows) * keep, order)]
    return [
        chosen(row, own, budget, int(budget * alpha)) for row, own, budget in zip(rows, norms, budgets, strict=True)
    ]
