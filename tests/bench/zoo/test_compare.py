"""Losses, paired differences and the front of a small record."""

import math

import attrs
import pytest

from qevict.bench.statistics import paired_difference
from qevict.bench.zoo.compare import Scene, scenes
from qevict.bench.zoo.record import Record

OURS, THEIRS, BEFORE, CODEC, FULL = (
    ("ours", "10 %"),
    ("QEvict", "10 %"),
    ("QEvict", "20 %"),
    ("codec", None),
    ("full", None),
)


def scene(record: Record, title: str = "needle") -> Scene:
    return next(own for own in scenes(record.rows) if own.title == title)


def test_scenes_are_retrieval_as_a_whole_and_each_task(record: Record) -> None:
    found = list(scenes(record.rows))
    assert [own.title for own in found] == ["retrieval", "needle", "key-value recall", "perplexity"]
    assert len(found[0].seen[OURS]) == 8
    assert [own.title for own in scenes(record.rows[:6])] == ["needle"]


def test_losses_are_above_the_full_cache_of_the_same_prompt(record: Record) -> None:
    loss = scene(record).loss(OURS)
    assert loss is not None
    assert loss.mean == pytest.approx((0.4 + 0.4 + 0.4 + 0.32) / 4)
    assert scene(record).loss(("lone", "10 %")) is None, "one prompt has no interval"


def test_differences_are_paired_on_common_prompts(record: Record) -> None:
    own = scene(record)
    found, wanted = own.difference(OURS, THEIRS), paired_difference([0.4, 0.4, 0.4, 0.32], [2.0, 2.0, 2.0, 2.0])
    assert found is not None
    assert attrs.astuple(found) == pytest.approx(attrs.astuple(wanted))
    assert own.at_equal_bytes(OURS) == own.difference(OURS, THEIRS)
    assert own.difference(OURS, ("absent", None)) is None


def test_prompts_of_one_alone_do_not_count_and_few_are_too_few(record: Record) -> None:
    own = scene(record, "retrieval")
    shorter = attrs.evolve(own, seen={**own.seen, THEIRS: dict(list(own.seen[THEIRS].items())[1:])})
    found = shorter.difference(OURS, THEIRS)
    assert found is not None
    assert found.mean == pytest.approx((0.4 + 0.4 + 0.32 + 0.5 + 0.4 + 0.4 + 0.32) / 7 - (6 * 2.0 + 2.1) / 7)
    few = attrs.evolve(own, seen={**own.seen, THEIRS: dict(list(own.seen[THEIRS].items())[-3:])})
    assert few.difference(OURS, THEIRS) is None


def test_a_policy_without_a_budget_meets_the_interpolated_curve(record: Record) -> None:
    """Half way between 20 % and the full cache on the logarithm, QEvict would lose half of what it loses at 20 %."""
    own = scene(record)
    found = own.at_equal_bytes(CODEC)
    part = math.log(0.447 / 0.2) / math.log(1.0 / 0.2)
    losses = [(1 - part) * loss for loss in (1.0, 1.0, 1.2, 1.2)]
    assert found is not None
    assert found.mean == pytest.approx((0.1 - sum(losses)) / 4)


def test_the_curve_is_not_interpolated_where_a_budget_was_not_measured(record: Record) -> None:
    own = scene(record)
    cut = attrs.evolve(own, seen={**own.seen, THEIRS: dict(list(own.seen[THEIRS].items())[:1])})
    assert cut.at_equal_bytes(CODEC) is None


def test_scores_are_shown_where_the_full_cache_knows(record: Record) -> None:
    assert scene(record).score(OURS) == 0.75
    assert scene(record).score(BEFORE) == 0.25
    assert scene(record, "perplexity").score(OURS) is None
    blind = attrs.evolve(record.rows[0], exact=(True, False, False, False))
    assert scene(Record({}, (blind, *record.rows[1:]))).score(OURS) is None


def test_the_front(record: Record) -> None:
    own = scene(record)
    assert own.front(OURS) is True
    assert own.front(BEFORE) is False, "ours loses less with fewer bytes"
    assert own.front(FULL) is True
    close = {
        place: attrs.evolve(each, loss=each.loss + 0.3 * (-1) ** place[1]) for place, each in own.seen[OURS].items()
    }
    told = attrs.evolve(own, seen={OURS: own.seen[OURS], ("close", "10 %"): close})
    assert told.front(("close", "10 %")) is True
    worse = {place: attrs.evolve(each, loss=each.loss + 0.01) for place, each in close.items()}
    assert attrs.evolve(told, seen={OURS: own.seen[OURS], ("close", "10 %"): worse}).front(("close", "10 %")) is None


def test_prompts_without_the_full_cache_do_not_count(record: Record) -> None:
    short = attrs.evolve(record.rows[0], places=(0, 1), nats=(0.1, 0.2), exact=(True, True), shares=(1.0, 1.0))
    assert len(scene(Record({}, (short, *record.rows[1:]))).seen[OURS]) == 2
