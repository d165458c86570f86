"""The slow references say what the algorithms notes work out by hand."""

from fractions import Fraction
from typing import Any

import pytest

from tests.baselines import worked
from tests.baselines.slow import (
    adakv,
    counter_causal,
    criticalkv,
    defensivekv,
    h2o,
    pyramidkv,
    snapkv,
    streaming_llm,
    tova,
)
from tests.baselines.slow.basics import (
    Rows,
    average_pool,
    group_max,
    group_mean,
    highest,
    lower_head_first,
    max_pool,
    mean,
    top,
    with_window,
)

HALF = Fraction(1, 2)
QUARTER = Fraction(1, 4)
PREFIX_NORMS = [row[: -worked.WINDOW] for row in worked.NORMS]


def rounded(value: Any, digits: int = 4) -> Any:
    """The value as the notes print it."""
    return [rounded(part, digits) for part in value] if isinstance(value, list) else round(value, digits)


def scaled(factor: float) -> list[list[list[float]]]:
    """The toy's attention, of which the window now takes more."""
    return [[[value * factor for value in row] for row in rows] for rows in worked.ATTENTION]


def toy_snapkv() -> list[list[float]]:
    return snapkv.scores(worked.ATTENTION, worked.KV_HEADS, worked.KERNEL)


def toy_snapkv_max() -> list[list[float]]:
    return snapkv.scores_of_groups(worked.ATTENTION, worked.KV_HEADS, worked.KERNEL, max_pool)


def toy_defensive(factor: float, share: Fraction) -> list[list[float]]:
    attention = scaled(factor)
    bias = defensivekv.bias_of_last_prefix(attention, worked.WINDOW)
    return defensivekv.scores(attention, PREFIX_NORMS, worked.KERNEL, worked.WINDOW, share, bias)


def test_streaming_llm() -> None:
    kept = streaming_llm.kept(12, 4, 4)
    assert kept == worked.STREAMING_KEPT
    assert streaming_llm.rotated_at(kept) == worked.STREAMING_ROTATED_AT
    assert len(kept) == worked.STREAMING_NEXT_QUERY_AT
    assert streaming_llm.kept_for(12, 3, 4, 4) == worked.STREAMING_KEPT_FOR_3
    assert streaming_llm.kept_after_prompt(12, 6) == worked.STREAMING_KVPRESS_HALF


def test_streaming_llm_step_by_step_keeps_what_one_cut_keeps() -> None:
    held: list[int] = []
    for position in range(12):
        held = streaming_llm.step(held, position, 4, 4)
    assert held == streaming_llm.kept(12, 4, 4)


def sums(held: h2o.Held) -> list[list[float]]:
    return [[rounded(sum_) for _, sum_ in entries] for entries in held]


def test_h2o() -> None:
    everything = h2o.step(h2o.nothing(2), worked.H2O_PROMPT, 0, heavy=5, recent=0)
    assert sums(everything) == worked.H2O_SUMS
    held = h2o.step(h2o.nothing(2), worked.H2O_PROMPT, 0, heavy=2, recent=2)
    assert h2o.positions(held) == worked.H2O_KEPT
    assert sums(h2o.step(held, worked.H2O_DECODED, 5, heavy=5, recent=0)) == worked.H2O_SUMS_DECODED
    assert h2o.positions(h2o.step(held, worked.H2O_DECODED, 5, heavy=2, recent=2)) == worked.H2O_KEPT_DECODED


def test_h2o_as_an_average_over_the_prompt() -> None:
    averages = h2o.averages(worked.H2O_PROMPT)
    assert rounded(averages, 3) == worked.H2O_KVPRESS_AVERAGES
    assert top(group_mean(averages, 1)[0], 4) == worked.H2O_KVPRESS_GROUP_MEAN_KEPT_4
    of_group = h2o.averages(h2o.group_attention(worked.H2O_PROMPT, 1))
    assert rounded(of_group) == rounded(group_mean(averages, 1))


def test_snapkv() -> None:
    scores = toy_snapkv()
    assert rounded(scores) == worked.SNAPKV_AVERAGE
    assert snapkv.kept(scores, worked.WINDOW, 4) == worked.SNAPKV_KVPRESS_KEPT
    assert snapkv.kept_ranked(scores, worked.WINDOW, 4) == worked.SNAPKV_KVPRESS_KEPT


def test_snapkv_with_a_maximum_over_the_group() -> None:
    scores = snapkv.scores(worked.ATTENTION, worked.KV_HEADS, worked.KERNEL, group=group_max)
    assert snapkv.kept(scores, worked.WINDOW, 4) == worked.SNAPKV_GROUP_MAX_KEPT


def test_snapkv_reduced_before_a_max_pool() -> None:
    scores = toy_snapkv_max()
    assert rounded(scores) == worked.SNAPKV_MAX_OF_GROUP
    assert snapkv.kept(scores, worked.WINDOW, 4) == worked.SNAPKV_MAX_OF_GROUP_KEPT
    assert rounded(snapkv.scores(worked.ATTENTION, worked.KV_HEADS, worked.KERNEL, max_pool)) != rounded(scores)


def test_snapkv_order_of_average_pool_and_group_mean_is_free() -> None:
    pooled_last = snapkv.scores_of_groups(worked.ATTENTION, worked.KV_HEADS, worked.KERNEL, average_pool)
    assert rounded(pooled_last, 12) == rounded(toy_snapkv(), 12)


def test_snapkv_of_query_heads() -> None:
    scores = snapkv.scores_of_query_heads(worked.ATTENTION, worked.KERNEL)
    assert snapkv.kept(scores, worked.WINDOW, 4) == worked.SNAPKV_QUERY_HEADS_KEPT


def test_snapkv_budget_below_the_window() -> None:
    assert snapkv.kept(toy_snapkv(), worked.WINDOW, 1) == [[6, 7], [6, 7]]
    assert snapkv.kept_ranked(toy_snapkv(), worked.WINDOW, 1) == [[6], [6]]


@pytest.mark.parametrize(("keep", "alpha", "floor", "kept"), worked.ADAKV_FLOORED)
def test_adakv_floored(keep: int, alpha: float, floor: int, kept: list[list[int]]) -> None:
    assert int(keep * alpha) == floor
    assert adakv.kept_floored(toy_snapkv(), worked.WINDOW, keep, alpha) == kept


@pytest.mark.parametrize(("keep", "alpha", "shares", "budgets", "kept"), worked.ADAKV_BLENDED)
def test_adakv_blended(keep: int, alpha: float, shares: list[int], budgets: list[int], kept: list[list[int]]) -> None:
    base = keep - worked.WINDOW
    assert adakv.shares(toy_snapkv_max(), base) == shares
    assert adakv.blended(shares, base, alpha) == budgets
    assert adakv.kept_blended(toy_snapkv_max(), worked.WINDOW, keep, alpha) == kept


@pytest.mark.parametrize(("alpha", "budgets"), worked.ADAKV_BLENDS)
def test_adakv_blend(alpha: float, budgets: list[int]) -> None:
    assert adakv.blended([17, 3], 10, alpha) == budgets


def weighted(scores: Rows) -> list[list[float]]:
    return [
        [score * size for score, size in zip(*pair, strict=True)] for pair in zip(scores, PREFIX_NORMS, strict=True)
    ]


def test_criticalkv() -> None:
    scores = toy_snapkv()
    assert rounded(weighted(scores)) == worked.CRITICAL_WEIGHTED
    heads = list(zip(scores, PREFIX_NORMS, strict=True))
    first = [criticalkv.chosen(row, norms, 1, 1) for row, norms in heads]
    both = [criticalkv.chosen(row, norms, 2, 1) for row, norms in heads]
    assert first == worked.CRITICAL_FIRST
    assert [sorted({*all_} - {*one}) for all_, one in zip(both, first, strict=True)] == worked.CRITICAL_SECOND
    assert criticalkv.kept(scores, PREFIX_NORMS, worked.WINDOW, 4) == worked.CRITICAL_KEPT
    assert snapkv.kept(scores, worked.WINDOW, 4) == worked.CRITICAL_SNAPKV_KEPT


def test_criticalkv_with_the_window_ranked_along() -> None:
    scores = toy_snapkv()
    rows = with_window(scores, worked.WINDOW, highest(scores) + 1)
    assert [top(row, worked.CRITICAL_KVPRESS_FIRST_BUDGET) for row in rows] == worked.CRITICAL_KVPRESS_FIRST
    assert criticalkv.kept_ranked(scores, worked.NORMS, worked.WINDOW, 4) == worked.CRITICAL_KVPRESS_KEPT


def test_defensivekv_risks() -> None:
    toy = worked.ATTENTION, worked.KV_HEADS, worked.KERNEL
    worst = defensivekv.worst(*toy)
    assert rounded(worst) == worked.DEFENSIVE_WORST
    assert [rounded(mean(row)) for row in worst] == worked.DEFENSIVE_PRIOR
    assert rounded(defensivekv.risks(*toy)) == worked.DEFENSIVE_RISKS
    assert rounded(toy_snapkv()) == worked.DEFENSIVE_MEAN


def test_defensivekv_first_stage() -> None:
    bias = defensivekv.bias_of_last_prefix(worked.ATTENTION, worked.WINDOW)
    assert rounded(bias) == worked.DEFENSIVE_BIAS
    assert rounded(0.9 - bias) == worked.DEFENSIVE_THRESHOLD
    most = defensivekv.cap(len(PREFIX_NORMS[0]), HALF, worked.WINDOW)
    assert most == worked.DEFENSIVE_CAP
    stage = defensivekv.first_stage(worked.ATTENTION, worked.KV_HEADS, bias, most)
    assert stage == worked.DEFENSIVE_FIRST
    assert [len(own) for own in stage] == worked.DEFENSIVE_FIRST_COUNTS
    assert rounded(defensivekv.bias_of_window(worked.ATTENTION)) == 0.2


def test_defensivekv() -> None:
    assert rounded(defensivekv.shares(PREFIX_NORMS)) == worked.DEFENSIVE_SHARES
    scores = toy_defensive(1, HALF)
    most = worked.LAYER_MAXIMA[0]
    assert rounded(scores) == [[most, *row[1:]] for row in worked.DEFENSIVE_WEIGHTED]
    assert rounded(toy_defensive(1, QUARTER)) == worked.DEFENSIVE_WEIGHTED, "no first stage: the cap is zero"
    assert defensivekv.kept(scores, worked.WINDOW, HALF) == worked.DEFENSIVE_KEPT


def test_layer_defensivekv() -> None:
    layers = [toy_defensive(1, HALF), toy_defensive(0.25, HALF)]
    assert [rounded(highest(scores)) for scores in layers] == worked.LAYER_MAXIMA
    assert rounded(layers[1]) == worked.LAYER_SECOND_SCORES
    kept = defensivekv.kept_over_layers(layers, worked.WINDOW, HALF, lower_head_first)
    assert kept == worked.LAYER_KEPT
    assert [sum(len(head) for head in heads) for heads in kept] == worked.LAYER_BUDGETS
    earlier = defensivekv.kept_over_layers(layers, worked.WINDOW, HALF)
    assert earlier == [worked.LAYER_KEPT[0], [[0], [0]]], "equal scores, the earlier position first"


def test_layer_defensivekv_can_lose_the_window_of_a_layer() -> None:
    layers = [toy_defensive(1, QUARTER), toy_defensive(0.05, QUARTER)]
    assert defensivekv.kept_over_layers(layers, worked.WINDOW, QUARTER) == worked.LAYER_TRAP_KEPT


def test_tova() -> None:
    scores = tova.scores(worked.TOVA_ROWS)
    assert rounded(scores) == worked.TOVA_SCORES
    assert tova.kept(scores, 4) == worked.TOVA_KEPT_4
    assert tova.kept(scores, 7) == worked.TOVA_KEPT_7
    assert tova.step(range(7), 7, worked.TOVA_ROWS, 7) == worked.TOVA_KEPT_7
    assert tova.kept_with_newest(scores, 7) == [0, 1, 2, 3, 5, 6, 7]


def test_pyramidkv() -> None:
    large = pyramidkv.prefix_tokens(544, 32, 8192, 32)
    assert (large[0], large[-1], sum(large), sum(large) / 32) == worked.PYRAMID_LARGE
    assert pyramidkv.prefix_tokens(24, 4, 200, 5) == worked.PYRAMID_SMALL


def test_pyramidkv_of_kvpress() -> None:
    keep = 200 * (1 - 0.9)
    assert pyramidkv.tokens(keep, 4, 200, 5, beta=4) == worked.PYRAMID_KVPRESS
    assert pyramidkv.tokens(keep, 64, 200, 5) == worked.PYRAMID_KVPRESS_UNIFORM
    assert pyramidkv.tokens(Fraction(20), 4, 200, 5, beta=4) == [35, 28, 20, 12, 5], "27.5 itself, rounded to even"


def test_counter_causal() -> None:
    assert counter_causal.kept(worked.COUNTER_CAUSAL_LOGITS, 1, 2, 4) == worked.COUNTER_CAUSAL_KEPT
