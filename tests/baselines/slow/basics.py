"""What the slow references share. Plain Python over nested lists: no tensor, no contract of qevict, one loop per index.

Attention is ``attention[query_head][query][key]``. Scores are ``scores[head][position]``. What is kept is a sorted list
of positions per head. Of equal scores the earlier position wins, then the lower head.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

Row = Sequence[float]
Rows = Sequence[Row]
Attention = Sequence[Rows]
Order = Callable[[int, int], tuple[int, int]]
Item = TypeVar("Item")


def earlier_first(head: int, position: int) -> tuple[int, int]:
    """Of equal scores the earlier position wins, then the lower head."""
    return position, head


def lower_head_first(head: int, position: int) -> tuple[int, int]:
    """Of equal scores the lower head wins, then the earlier position: a stable sort of the heads end to end."""
    return head, position


def top(scores: Row, count: int) -> list[int]:
    """Positions of the highest scores of one head, sorted; none for a count below one."""
    return sorted(ranked(scores)[: max(count, 0)])


def ranked(scores: Row) -> list[int]:
    """Positions of one head, best first."""
    return sorted(range(len(scores)), key=lambda position: (-scores[position], position))


def top_flat(scores: Rows, count: int, order: Order = earlier_first) -> list[list[int]]:
    """Positions per head of the highest scores of all heads together."""
    everywhere = [(head, position) for head, row in enumerate(scores) for position in range(len(row))]
    everywhere.sort(key=lambda place: (-scores[place[0]][place[1]], *order(*place)))
    chosen = everywhere[: max(count, 0)]
    return [sorted(position for other, position in chosen if other == head) for head in range(len(scores))]


def top_over_layers(layers: Attention, count: int, order: Order = earlier_first) -> list[list[list[int]]]:
    """Positions per layer and head of the highest of all scores; later layers' heads come after earlier ones'."""
    flat = top_flat([row for scores in layers for row in scores], count, order)
    heads = len(layers[0])
    return [flat[layer * heads : (layer + 1) * heads] for layer in range(len(layers))]


def mean(row: Row) -> float:
    return math.fsum(row) / len(row)


def dot(left: Row, right: Row) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def norm(vector: Row) -> float:
    return math.sqrt(dot(vector, vector))


def average_pool(row: Row, kernel: int) -> list[float]:
    """Mean over ``kernel`` neighbours; what lies beyond an edge counts as zero, so edges are attenuated."""
    side = kernel // 2
    return [math.fsum(row[max(at - side, 0) : at + side + 1]) / kernel for at in range(len(row))]


def max_pool(row: Row, kernel: int) -> list[float]:
    """Maximum over ``kernel`` neighbours; what lies beyond an edge never wins."""
    side = kernel // 2
    return [max(row[max(at - side, 0) : at + side + 1]) for at in range(len(row))]


def over_queries(attention: Attention) -> list[list[float]]:
    """Mean over the queries of each head."""
    return [[mean(column) for column in zip(*rows, strict=True)] for rows in attention]


def group_mean(rows: Rows, kv_heads: int) -> list[list[float]]:
    """Mean over the query heads of each KV head; query heads of one KV head are neighbours."""
    return [[mean(column) for column in zip(*group, strict=True)] for group in groups(rows, kv_heads)]


def group_max(rows: Rows, kv_heads: int) -> list[list[float]]:
    """Maximum over the query heads of each KV head."""
    return [[max(column) for column in zip(*group, strict=True)] for group in groups(rows, kv_heads)]


def groups(heads: Sequence[Item], kv_heads: int) -> list[Sequence[Item]]:
    size = len(heads) // kv_heads
    return [heads[head * size : (head + 1) * size] for head in range(kv_heads)]


def with_window(scores: Rows, window: int, value: float) -> list[list[float]]:
    """Scores of the prefix, followed by a window of tokens that all score ``value``."""
    return [[*row, *[value] * window] for row in scores]


def highest(scores: Rows) -> float:
    return max(max(row) for row in scores)


def softmax(logits: Row) -> list[float]:
    most = max(logits)
    powers = [math.exp(logit - most) for logit in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]


def causal_attention(queries: Attention, keys: Attention) -> list[list[list[float]]]:
    """Attention of the last tokens: ``queries[query_head][query]`` over ``keys[kv_head][key]``, zero where masked."""
    rows = []
    for head, own in enumerate(queries):
        held = keys[head * len(keys) // len(queries)]
        before = len(held) - len(own)
        rows.append([causal_row(query, held, before + at + 1) for at, query in enumerate(own)])
    return rows


def causal_row(query: Row, keys: Rows, seen: int) -> list[float]:
    """Attention of one query over the first ``seen`` keys."""
    scale = math.sqrt(len(query))
    return [*softmax([dot(query, key) / scale for key in keys[:seen]]), *[0.0] * (len(keys) - seen)]


def prefix_of(attention: Attention, window: int) -> list[list[list[float]]]:
    """The last ``window`` queries over the tokens before them."""
    return [[list(row[:-window]) for row in rows[-window:]] for rows in attention]
