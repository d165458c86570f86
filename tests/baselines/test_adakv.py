"""AdaKV's allocation against loops, and the worked values of the algorithms notes, section 5."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qevict.contracts.scorer import IMPORTANCE
from qevict.errors import PolicyError
from qevict.routers.greedy import GreedyTiers
from qevict.testing import RouterContract
from qevict_baselines.adakv import AdaptiveHeads, Floor
from tests.baselines.allocation import budgets
from tests.baselines.slow.basics import top
from tests.baselines.worked import ADAKV_BLENDED, ADAKV_BLENDS, SNAPKV_MAX_OF_GROUP, WINDOW
from tests.routers.by_loop import Remaining, Rule, by_loop, kept, layer_of, scene_of


def adaptive(floor: Floor, alpha: Fraction) -> Rule:
    def choose(left: Remaining, slots: int) -> list[list[int]]:
        scores = left.scores[IMPORTANCE]
        return [top(own, size) for own, size in zip(scores, budgets(left, scores, slots, floor, alpha), strict=True)]

    return choose


@pytest.mark.parametrize("floor", ["blend", "hard"])
@given(seed=st.integers(0, 2**31), tenths=st.sampled_from([0, 2, 5, 10]))
@settings(deadline=None, max_examples=80)
def test_the_plan_is_that_of_the_loop(floor: Floor, seed: int, tenths: int) -> None:
    scene = scene_of(seed)
    router = AdaptiveHeads(scene.shares, tenths / 10, floor)
    expected = by_loop(scene, "layer", lambda _: adaptive(floor, Fraction(tenths, 10)))
    assert scene.ask(router).place.tolist() == expected


def kept_of(scores: list[list[float]], slots: int, router: AdaptiveHeads) -> list[list[int]]:
    return kept(layer_of({IMPORTANCE: scores}, slots), router)


@pytest.mark.parametrize(("tokens", "alpha", "_shares", "budgets", "kept"), ADAKV_BLENDED)
def test_the_worked_example(
    tokens: int, alpha: float, _shares: list[int], budgets: list[int], kept: list[list[int]]
) -> None:
    """The observation window is kept besides; one slot is lost to rounding in each."""
    before = kept_of(SNAPKV_MAX_OF_GROUP, tokens - WINDOW, AdaptiveHeads(alpha=alpha))
    assert [len(own) for own in before] == budgets
    assert before == [own[:-WINDOW] for own in kept]


@pytest.mark.parametrize(("alpha", "sizes"), ADAKV_BLENDS)
def test_the_worked_example_of_the_allocation(alpha: float, sizes: list[int]) -> None:
    """Ten slots per head, 17 of the best in head 0; 8.5 + 5 and 1.5 + 5 are halves, rounded to even."""
    scores = [[9.0 - at / 100 for at in range(17)] + [0.1] * 8, [8.0, 7.0, 6.0] + [0.2] * 22]
    assert [len(own) for own in kept_of(scores, 10, AdaptiveHeads(alpha=alpha))] == sizes


def test_a_hard_floor_comes_first_and_leaves_no_slot_empty() -> None:
    scores = [[9.0, 8.0, 7.0, 6.0], [1.0, 2.0, 3.0, 4.0]]
    assert kept_of(scores, 2, AdaptiveHeads(alpha=0.5, floor="hard")) == [[0, 1, 2], [3]]
    assert kept_of(scores, 2, AdaptiveHeads(alpha=0.2, floor="hard")) == [[0, 1, 2, 3], []]


def test_what_rounding_adds_is_taken_from_the_largest_and_the_later() -> None:
    """Two slots for each of four heads; half of 5, 1, 1, 1 and 1 each is 3.5, 1.5, 1.5, 1.5: nine, rounded to even."""
    scores = [[9.0, 9.0, 9.0, 9.0, 9.0], *[[8.0, 1.0, 1.0, 1.0, 1.0]] * 3]
    assert [len(own) for own in kept_of(scores, 2, AdaptiveHeads(alpha=0.5))] == [3, 2, 2, 1]


def test_a_layer_that_fits_is_not_cut_whatever_the_rounding() -> None:
    assert kept_of([[1.0, *[math.nan] * 4], [5.0, 4.0, 3.0, 2.0, 1.5]], 3, AdaptiveHeads()) == [[0], [0, 1, 2, 3, 4]]


def test_without_a_floor_it_is_the_best_of_the_layer() -> None:
    scene = scene_of(3)._replace(capacities=(7,) * len(scene_of(3).capacities))
    assert scene.ask(AdaptiveHeads(scene.shares, 0.0)).place.equal(scene.ask(GreedyTiers(scene.shares, "layer")).place)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, True, "half"])
def test_a_weight_outside_of_0_and_1_is_refused(alpha: float) -> None:
    with pytest.raises(PolicyError, match=r"alpha is a part of a whole, in \[0, 1\]; got"):
        AdaptiveHeads(alpha=alpha)


def test_an_unknown_floor_is_refused() -> None:
    with pytest.raises(PolicyError, match="one of 'blend', 'hard'; got 'soft'"):
        AdaptiveHeads(floor="soft")  # type: ignore[arg-type]


class TestAdaptiveHeads(RouterContract):
    part = AdaptiveHeads((0.4, 0.6))
    examples = 8


class TestHardFloor(RouterContract):
    part = AdaptiveHeads(floor="hard")
    examples = 8
