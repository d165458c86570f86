"""SnapKV (arXiv 2404.14469): pooled attention of an observation window on the tokens before it."""

from collections.abc import Callable

from tests.baselines.slow.basics import (
    Attention,
    Row,
    Rows,
    average_pool,
    group_mean,
    highest,
    over_queries,
    top,
    with_window,
)

Pool = Callable[[Row, int], list[float]]
Group = Callable[[Rows, int], list[list[float]]]


def scores(
    prefix: Attention, kv_heads: int, kernel: int, pool: Pool = average_pool, group: Group = group_mean
) -> list[list[float]]:
    """Pooled, then reduced to KV heads, as kvpress does. ``prefix``: the window's attention on the tokens before it."""
    return group([pool(row, kernel) for row in over_queries(prefix)], kv_heads)


def scores_of_groups(
    prefix: Attention, kv_heads: int, kernel: int, pool: Pool, group: Group = group_mean
) -> list[list[float]]:
    """Reduced to KV heads, then pooled, as the authors of AdaKV do; differs from ``scores`` under a max pool."""
    return [pool(row, kernel) for row in group(over_queries(prefix), kv_heads)]


def scores_of_query_heads(prefix: Attention, kernel: int, pool: Pool = average_pool) -> list[list[float]]:
    """The original: no reduction, one set per query head."""
    return [pool(row, kernel) for row in over_queries(prefix)]


def kept(scores: Rows, window: int, keep: int) -> list[list[int]]:
    """The window, whole whatever the budget, and the best of the tokens before it, ``keep`` in all."""
    tail = [list(range(len(row), len(row) + window)) for row in scores]
    return [top(row, keep - window) + own for row, own in zip(scores, tail, strict=True)]


def kept_ranked(scores: Rows, window: int, keep: int) -> list[list[int]]:
    """The form of kvpress: the window ranks first, and a budget smaller than the window cuts the window's end."""
    return [top(row, keep) for row in with_window(scores, window, highest(scores) + 1)]
