"""Safe windows and the worst case against loops, and the worked values of the algorithms notes, sections 7 and 7b."""

import math
import random

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qevict.contracts.router import Scope
from qevict.contracts.scorer import IMPORTANCE
from qevict.errors import PolicyError
from qevict.testing import RouterContract
from qevict_baselines.criticalkv import ATTENTION
from qevict_baselines.defensivekv import Bias, SafeThenWorstCase
from tests.baselines.slow.basics import group_mean, over_queries, top_flat
from tests.baselines.slow.defensivekv import bias_of_last_prefix, bias_of_window, first_stage
from tests.baselines.worked import ATTENTION as ATTENDED
from tests.baselines.worked import (
    DEFENSIVE_BIAS,
    DEFENSIVE_KEPT,
    DEFENSIVE_WEIGHTED,
    KV_HEADS,
    LAYER_BUDGETS,
    LAYER_KEPT,
    LAYER_MAXIMA,
    LAYER_SECOND_SCORES,
    LENGTH,
    WINDOW,
)
from tests.routers.by_loop import Remaining, Rule, Scene, by_loop, kept, layer_of, scene_of

SCOPES: tuple[Scope, ...] = ("layer", "model")


def attended_scene(seed: int) -> Scene:
    """Attention of each lane adds up to less than 1, with some windows alike."""
    scene, chance = scene_of(seed, (ATTENTION, IMPORTANCE)), random.Random(seed)
    attention = [[max(score, 0.01) for score in own] for own in scene.scores[ATTENTION]]
    parts = [chance.uniform(0.5, 0.95) for _ in attention]
    scores = [[part * score / math.fsum(own) for score in own] for part, own in zip(parts, attention, strict=True)]
    return scene._replace(scores={**scene.scores, ATTENTION: scores})


def rule(every: Remaining, heads: int, observed: int, window_bias: Bias) -> Rule:
    """From all candidates of a group: which are safe as long as they fit; then what is best of the others."""
    attention = every.scores[ATTENTION]
    layers = [attention[first : first + heads] for first in range(0, len(attention), heads)]
    safe: list[set[int]] = []
    for layer in layers:
        rows = [[own] for own in layer]
        bias = bias_of_window(rows) if window_bias == "observed" else bias_of_last_prefix(rows, observed)
        stages = first_stage(rows, len(rows), bias, 10**6)
        safe += [{every.columns[len(safe) + head][at] for at in own} for head, own in enumerate(stages)]

    def choose(left: Remaining, slots: int) -> list[list[int]]:
        base, forced = slots // len(attention), []
        for columns, own, scores, all_ in zip(left.columns, safe, left.scores[ATTENTION], every.columns, strict=True):
            most = max(len(all_) * (base + observed) // (len(all_) + observed) - observed, 0)
            inside = [at for at, column in enumerate(columns) if column in own]
            forced.append(sorted(inside, key=lambda at, scores=scores: (-scores[at], at))[:most])  # type: ignore[misc]
        raised = [
            [math.inf if at in first else score for at, score in enumerate(scores)]
            for first, scores in zip(forced, left.scores[IMPORTANCE], strict=True)
        ]
        return top_flat(raised, slots, left.order)

    return choose


@pytest.mark.parametrize("window_bias", ["prefix", "observed"])
@pytest.mark.parametrize("scope", SCOPES)
@given(seed=st.integers(0, 2**31), observed=st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_the_plan_is_that_of_the_loop(scope: Scope, window_bias: Bias, seed: int, observed: int) -> None:
    scene = attended_scene(seed)
    router = SafeThenWorstCase(scene.shares, scope, window_bias=window_bias, observed_windows=observed)
    expected = by_loop(scene, scope, lambda every: rule(every, scene.heads, observed, window_bias))
    assert scene.ask(router).place.tolist() == expected


MEANS = group_mean(over_queries(ATTENDED), KV_HEADS)
WORKED = layer_of({ATTENTION: MEANS, IMPORTANCE: DEFENSIVE_WEIGHTED}, LENGTH // 2 - WINDOW)


def test_the_worked_example() -> None:
    """At most one token of each head is safe, its first; two of the other head are the best of the rest."""
    router = SafeThenWorstCase(observed_windows=WINDOW)
    assert kept(WORKED, router) == [own[:-WINDOW] for own in DEFENSIVE_KEPT]
    assert kept(WORKED, attrs.evolve(router, mass=0.0)) == [[4], [1, 2, 5]]


@pytest.mark.parametrize(("mass", "count"), [(0.4, 1), (0.6, 2), (0.9, 3)])
def test_as_many_are_safe_as_stay_below_the_threshold(mass: float, count: int) -> None:
    """And no more than the cap: of the four below 0.9 less the bias, three. Head 1 leaves 4 slots."""
    safe = first_stage([[own] for own in MEANS], KV_HEADS, DEFENSIVE_BIAS + 0.9 - mass, 3)[0]
    assert len(safe) == count
    risks = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    expected = sorted(range(6), key=lambda at: (at not in safe, -risks[at]))[:4]
    scene = layer_of({ATTENTION: MEANS, IMPORTANCE: [risks, [9.0] * 6]}, 5)
    router = SafeThenWorstCase(mass=mass, observed_windows=WINDOW)
    assert kept(scene, router) == [sorted(expected), [*range(6)]]


def test_a_budget_too_small_for_a_safe_window_has_none() -> None:
    """In the released code the negative cap, as the end of a slice, would select nearly everything."""
    assert kept(WORKED._replace(capacities=(1, 1)), SafeThenWorstCase(observed_windows=2)) == [[], [1, 5]]


def test_the_worked_example_over_layers() -> None:
    """As released: the window is ranked at its layer's maximum, and so are the first stage's tokens."""
    layers = [DEFENSIVE_WEIGHTED, LAYER_SECOND_SCORES]
    first = [
        [most if at == 0 else risk for at, risk in enumerate(own)]
        for most, scores in zip(LAYER_MAXIMA, layers, strict=True)
        for own in scores
    ]
    padded = [
        [*own, most, most]
        for own, most in zip(first, [most for most in LAYER_MAXIMA for _ in range(KV_HEADS)], strict=True)
    ]
    one = layer_of({ATTENTION: [[0.1] * LENGTH] * 4, IMPORTANCE: padded}, LENGTH // 2)
    places = kept(one._replace(layers=2, heads=KV_HEADS), SafeThenWorstCase(scope="model", mass=0.0))
    assert [sum(map(len, places[at : at + 2])) for at in (0, 2)] == LAYER_BUDGETS
    assert places[:2] == LAYER_KEPT[0]
    assert places[2:] == [[0], [0]]  # ties: the earlier position, then the lower lane


def test_lanes_without_attention_have_nothing_safe() -> None:
    scene = WORKED._replace(scores={ATTENTION: [[0.0] * 6, [math.nan] * 6], IMPORTANCE: DEFENSIVE_WEIGHTED})
    assert kept(scene, SafeThenWorstCase(observed_windows=1)) == [[4], [1, 2, 5]]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"scope": "lane"}, "scope is 'layer' .* or 'model' .*; got 'lane'"),
        ({"window_bias": "none"}, "one of 'prefix', 'observed'; got 'none'"),
        ({"observed_windows": 0}, "at least 1; got 0"),
        ({"mass": 1.5}, "in \\[0, 1\\]; got 1.5"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        SafeThenWorstCase(**wrong)  # type: ignore[arg-type]


class TestDefensiveKV(RouterContract):
    part = SafeThenWorstCase((0.4, 0.6), observed_windows=1)
    examples = 8


class TestLayerDefensiveKV(RouterContract):
    part = SafeThenWorstCase(scope="model", observed_windows=1)
    examples = 8
