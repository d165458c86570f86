"""H2O (arXiv 2306.14048): heavy hitters of accumulated attention, per head, evicted at every step."""

import math
from collections.abc import Sequence

from tests.baselines.slow.basics import Attention, group_mean, top

Held = Sequence[Sequence[tuple[int, float]]]
"""Per head, in order: positions that are held, each with the attention that it has received while it was held."""


def step(held: Held, attention: Attention, first: int, heavy: int, recent: int) -> list[list[tuple[int, float]]]:
    """What is held after a step of one or more tokens, the first of them at position ``first``.

    ``attention[head][query][key]``: keys are those held, in order, and then the new ones. The prompt is a step as
    well, onto nothing held. Eviction comes after the step, so tokens of one step see each other.
    """
    after = []
    for entries, rows in zip(held, attention, strict=True):
        grown = [*entries, *((first + at, 0.0) for at in range(len(rows)))]
        summed = [(where, math.fsum([sum_, *(row[at] for row in rows)])) for at, (where, sum_) in enumerate(grown)]
        after.append(evicted(summed, heavy, recent))
    return after


def evicted(entries: Sequence[tuple[int, float]], heavy: int, recent: int) -> list[tuple[int, float]]:
    """The latest tokens, and of those before them the ones with the largest sums."""
    if len(entries) <= heavy + recent:
        return list(entries)
    old = entries[: len(entries) - recent]
    return [*(old[at] for at in top([sum_ for _, sum_ in old], heavy)), *entries[len(entries) - recent :]]


def nothing(heads: int) -> list[list[tuple[int, float]]]:
    return [[] for _ in range(heads)]


def positions(held: Held) -> list[list[int]]:
    return [[position for position, _ in entries] for entries in held]


def group_attention(attention: Attention, kv_heads: int) -> list[list[list[float]]]:
    """Mean over the query heads of each KV head: the paper has as many of one as of the other."""
    by_query = [group_mean(rows, kv_heads) for rows in zip(*attention, strict=True)]
    return [list(rows) for rows in zip(*by_query, strict=True)]


def averages(attention: Attention) -> list[list[float]]:
    """The form of kvpress: attention of the whole prompt, each key's sum over the number of queries that see it."""
    return [[math.fsum(row[key] for row in rows) / (len(rows) - key) for key in range(len(rows))] for rows in attention]
