"""The demo on the real model: the very run that makes the table, watched."""

import io
from typing import Any

import pytest
from rich.console import Console

from qevict.bench.demo import EVICT, FULL, QEVICT, SINKS, contestants, run_policy, speeds, table, verdict
from qevict.bench.examination import Examination
from qevict.bench.models import load
from qevict.bench.prompts import load_questions
from qevict.testing.footprint import reachable_bytes

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    """The demo model."""
    return load()


@pytest.fixture(scope="module")
def found(smollm2: tuple[Any, Any]) -> dict[str, Examination]:
    """The demo's rows; after every forward, bytes told are bytes held and within the budget."""

    def watch(cache: Any) -> None:
        report = cache.report()
        assert report.exact_bytes == reachable_bytes(cache) == sum(report.bytes_by_kind.values())
        if report.budget_bytes is not None:
            assert report.exact_bytes <= report.budget_bytes

    questions = load_questions()[:2]
    return {name: run_policy(*smollm2, policy, questions, watch) for name, policy in contestants("20 %").items()}


def test_the_full_cache_answers_both_questions(found: dict[str, Examination]) -> None:
    """The fixture can fail: the model knows the answers only from the document."""
    assert found[FULL].right == 2
    assert found[FULL].nats < 0.5
    assert found[FULL].finished.evictions == 0


def test_every_compressed_cache_holds_a_fifth_of_the_bytes(found: dict[str, Examination]) -> None:
    """And uses most of what it may hold."""
    for name in (SINKS, EVICT, QEVICT):
        report = found[name].finished
        assert 0.17 * report.full_bytes < report.exact_bytes <= 0.2 * report.full_bytes
        assert report.evictions > 0


def test_the_recoverable_tier_is_used_both_ways(found: dict[str, Examination]) -> None:
    """Windows were demoted, and promoted again while the replies were written."""
    report = found[QEVICT].finished
    assert report.demotions > 0
    assert report.promotions > 0
    assert report.windows["int2"] > report.windows["full"] > 0
    assert report.paper_bytes < report.exact_bytes


def test_qevict_loses_less_than_eviction_at_equal_bytes(found: dict[str, Examination]) -> None:
    """The figures of the demo, in a band that excludes the next worse policy's."""
    assert found[FULL].nats < found[QEVICT].nats < min(found[EVICT].nats, found[SINKS].nats) - 0.5


def test_the_table_and_its_verdict(smollm2: tuple[Any, Any], found: dict[str, Examination]) -> None:
    """Both print what was measured."""
    paces = speeds(*smollm2, contestants("20 %"), load_questions()[:2])
    console = Console(file=io.StringIO(), width=100)
    console.print(table(found, paces))
    shown = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO, given above
    for name, result in found.items():
        assert name in shown
        assert f"{result.nats:.2f}" in shown
    assert f"QEvict {found[QEVICT].right} of 2" in verdict(found)
