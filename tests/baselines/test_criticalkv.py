"""Both stages against loops, alone and under AdaKV, and the worked values of the algorithms notes, section 6."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qevict.contracts.scorer import IMPORTANCE
from qevict.errors import PolicyError
from qevict.testing import RouterContract
from qevict_baselines.adakv import AdaptiveHeads
from qevict_baselines.criticalkv import ATTENTION, AdaptiveTwoStages, TwoStages
from tests.baselines.allocation import budgets
from tests.baselines.slow.basics import top
from tests.baselines.worked import (
    CRITICAL_KEPT,
    CRITICAL_KVPRESS_KEPT,
    CRITICAL_SNAPKV_KEPT,
    CRITICAL_WEIGHTED,
    SNAPKV_AVERAGE,
    WINDOW,
)
from tests.routers.by_loop import Remaining, Scene, by_loop, kept, layer_of, scene_of

SEEDS = st.integers(0, 2**31)


def scene_with_both(seed: int) -> Scene:
    return scene_of(seed, (ATTENTION, IMPORTANCE))


def in_two_stages(left: Remaining, sizes: list[int]) -> list[list[int]]:
    """Half of each budget by attention; then the rest by importance, the first half forced in."""
    kept = []
    for attention, importance, size in zip(left.scores[ATTENTION], left.scores[IMPORTANCE], sizes, strict=True):
        stage = top(attention, size // 2)
        kept.append(top([math.inf if at in stage else score for at, score in enumerate(importance)], size))
    return kept


@given(SEEDS)
@settings(deadline=None, max_examples=80)
def test_alone_it_is_the_loop(seed: int) -> None:
    scene = scene_with_both(seed)
    plan = scene.ask(TwoStages(scene.shares))
    expected = by_loop(scene, "lane", lambda _: lambda left, slots: in_two_stages(left, [slots]))
    assert plan.place.tolist() == expected
    assert (plan.counts is None) == (scene.kept is not None)


@given(SEEDS)
@settings(deadline=None, max_examples=80)
def test_under_adakv_it_is_the_loop(seed: int) -> None:
    scene = scene_with_both(seed)

    def choose(left: Remaining, slots: int) -> list[list[int]]:
        return in_two_stages(left, budgets(left, left.scores[ATTENTION], slots, "blend", Fraction(1, 5)))

    plan = scene.ask(AdaptiveTwoStages(AdaptiveHeads(scene.shares)))
    assert plan.place.tolist() == by_loop(scene, "layer", lambda _: choose)


def test_the_worked_example() -> None:
    """One of two slots is the first stage's; the window is kept besides."""
    scene = layer_of({ATTENTION: SNAPKV_AVERAGE, IMPORTANCE: CRITICAL_WEIGHTED}, len(CRITICAL_KEPT[0]) - WINDOW)
    assert kept(scene, TwoStages()) == [own[:-WINDOW] for own in CRITICAL_KEPT]
    assert kept(scene, TwoStages(first_share=1.0)) == [own[:-WINDOW] for own in CRITICAL_SNAPKV_KEPT]
    assert kept(scene, TwoStages(first_share=0.0)) == [own[:-WINDOW] for own in CRITICAL_KVPRESS_KEPT]


def test_a_share_outside_of_0_and_1_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"first_share is a part of a whole, in \[0, 1\]; got 2"):
        TwoStages(first_share=2)


class TestTwoStages(RouterContract):
    part = TwoStages((0.4, 0.6))
    examples = 8


class TestAdaptiveTwoStages(RouterContract):
    part = AdaptiveTwoStages(AdaptiveHeads((0.4, 0.6)))
    examples = 8
