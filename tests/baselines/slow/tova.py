"""TOVA (arXiv 2401.06104): the attention of the latest query, mean over all query heads; one set for a layer."""

from collections.abc import Sequence

from tests.baselines.slow.basics import Row, Rows, mean, top


def scores(rows: Rows) -> list[float]:
    """``rows[query_head][key]``: attention of the latest query over all keys, its own included."""
    return [mean(column) for column in zip(*rows, strict=True)]


def kept(row: Row, size: int) -> list[int]:
    """Indices held; the newest token competes like any other."""
    return top(row, size)


def kept_with_newest(row: Row, size: int) -> list[int]:
    """The form of kvpress: the newest token stays."""
    return top([*row[:-1], max(row) + 1], size)


def step(held: Sequence[int], position: int, rows: Rows, size: int) -> list[int]:
    """Positions held after the token at ``position`` came; ``rows[query_head]`` covers those held and the token."""
    grown = [*held, position]
    return [grown[index] for index in kept(scores(rows), size)]
