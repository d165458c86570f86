"""A small record, made up."""

import pytest

from qevict.bench.zoo.record import Record, Row

PLACES = (0, 1, 2, 3)


def row(task: str, name: str, budget: str | None, nats: tuple[float, ...], share: float, *, right: int = 4) -> Row:
    """A policy that gets the first few prompts right."""
    count = len(nats)
    exact = tuple(place < right for place in range(count))
    return Row(task, "900", "unseen", name, budget, PLACES[:count], nats, exact, (share,) * count)


@pytest.fixture
def record() -> Record:
    """QEvict loses 1 to 1.2 nats at 20 % and 2 at 10 %; ours loses 0.4 at 10 %; a codec without budget sits between."""
    rows = []
    for task, step in (("needle", 0.0), ("key-value recall", 0.1), ("perplexity", 0.05)):
        rows += [
            row(task, "full", None, (0.1, 0.2, 0.3, 0.4), 1.0, right=3),
            row(task, "QEvict", "20 %", (1.1 + step, 1.2, 1.5, 1.6), 0.2, right=1),
            row(task, "QEvict", "10 %", (2.1 + step, 2.2, 2.3, 2.4), 0.1, right=0),
            row(task, "ours", "10 %", (0.5 + step, 0.6, 0.7, 0.72), 0.1, right=3),
            row(task, "codec", None, (0.1, 0.2, 0.3, 0.5), 0.447, right=3),
            row(task, "lone", "10 %", (0.4,), 0.1),
        ]
    facts = {"model": "a model", "missing": ["KIVI, 2 bits"], "left_out": {"needle/900/unseen/lone/10 %": 3}}
    return Record(facts, tuple(rows))
