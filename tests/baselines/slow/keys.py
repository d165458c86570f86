"""Scores of keys alone: KeyDiff (arXiv 2504.15364) and the norm of the key (arXiv 2406.11430).

KeyDiff is defined on rotated keys; on keys before RoPE it is another method. The function is the same.
"""

from tests.baselines.slow.basics import Attention, Row, Rows, dot, mean, norm


def keydiff(keys: Attention) -> list[list[float]]:
    """Minus the cosine between ``keys[kv_head][token]`` and the mean direction of the head's keys."""
    return [[-cosine(key, anchor(head)) for key in head] for head in keys]


def anchor(keys: Rows) -> list[float]:
    """Mean of the keys, each at length one."""
    return [mean(column) for column in zip(*(unit(key) for key in keys), strict=True)]


def unit(vector: Row) -> list[float]:
    length = norm(vector)
    return [value / length for value in vector] if length else list(vector)


def cosine(left: Row, right: Row) -> float:
    return dot(unit(left), unit(right))


def keynorm(keys: Attention) -> list[list[float]]:
    """Minus the L2 norm: small keys draw attention."""
    return [[-norm(key) for key in head] for head in keys]
