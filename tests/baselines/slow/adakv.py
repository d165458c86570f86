"""AdaKV (arXiv 2407.11550): a layer's budget goes to the heads that hold its highest scores."""

import math
from fractions import Fraction

from tests.baselines.slow.basics import Order, Rows, earlier_first, highest, top, top_flat, with_window


def shares(scores: Rows, base: int, order: Order = earlier_first) -> list[int]:
    """How many of the layer's ``heads * base`` highest scores fall in each head."""
    return [len(head) for head in top_flat(scores, len(scores) * base, order)]


def blended(shares: list[int], base: int, alpha: float | Fraction) -> list[int]:
    """The authors' budgets before the window: each share blended with the uniform one, of weight ``alpha``.

    Halves are rounded to even, and the sum may miss that of the shares.
    """
    return [round(share * (1 - alpha) + int(base * alpha)) for share in shares]


def kept_blended(
    scores: Rows, window: int, keep: int, alpha: float | Fraction, order: Order = earlier_first
) -> list[list[int]]:
    """The authors' form: ``scores`` of the prefix, ``keep`` tokens per head and window included; the window stays."""
    prefix = len(scores[0])
    if keep - window > prefix:
        return [list(range(prefix + window)) for _ in scores]
    budgets = blended(shares(scores, keep - window, order), keep - window, alpha)
    tail = list(range(prefix, prefix + window))
    return [top(row, budget) + tail for row, budget in zip(scores, budgets, strict=True)]


def floored(scores: Rows, floor: int) -> list[list[float]]:
    """The scores with the best ``floor`` tokens of each head above all others."""
    safe = [top(row, floor) for row in scores]
    return [
        [math.inf if at in own else score for at, score in enumerate(row)]
        for row, own in zip(scores, safe, strict=True)
    ]


def kept_floored(
    scores: Rows, window: int, keep: int, alpha: float | Fraction, order: Order = earlier_first
) -> list[list[int]]:
    """The form of kvpress: the window ranks first and counts in the floor of ``int(alpha * keep)`` tokens per head."""
    rows = with_window(scores, window, highest(scores) + 1)
    return top_flat(floored(rows, int(keep * alpha)), len(rows) * keep, order)


def kept_floored_before_window(
    scores: Rows, window: int, share: Fraction, alpha: float | Fraction, order: Order = earlier_first
) -> list[list[int]]:
    """The form of DefensiveKV's authors: the floor counts only tokens before the window; ``share`` is kept in all.

    Floor and window are equals there: where they exceed the budget together, position decides.
    """
    length = len(scores[0]) + window
    rows = with_window(floored(scores, int(length * share * alpha)), window, math.inf)
    return top_flat(rows, int(length * share * len(rows)), order)
