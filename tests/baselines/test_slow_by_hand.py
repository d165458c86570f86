"""The slow references that the notes work no example for, on values that fit in a head."""

import math
from fractions import Fraction

import pytest

from tests.baselines import worked
from tests.baselines.slow import (
    adakv,
    criticalkv,
    defensivekv,
    expected_attention,
    h2o,
    keys,
    kvzip,
    pyramidkv,
    snapkv,
    streaming_llm,
)
from tests.baselines.slow.basics import (
    average_pool,
    causal_attention,
    lower_head_first,
    max_pool,
    prefix_of,
    top,
    top_flat,
    top_over_layers,
)

LOG3 = math.log(3)


def test_the_earlier_position_wins_and_then_the_lower_head() -> None:
    assert top([1, 2, 2, 2], 2) == [1, 2]
    assert top_flat([[1, 2, 2], [2, 2, 1]], 3) == [[1], [0, 1]]
    assert top_flat([[1, 2, 2], [2, 2, 1]], 3, lower_head_first) == [[1, 2], [0]]
    assert top_over_layers([[[1, 5]], [[4, 5]]], 3) == [[[1]], [[0, 1]]]


def test_pools_at_the_edges() -> None:
    assert average_pool([3, 0, 6], 3) == [1, 3, 2]
    assert max_pool([-3, -4, -6], 3) == [-3, -3, -4]


def test_causal_attention_of_the_last_tokens() -> None:
    rows = causal_attention([[[0.0], [0.0]]] * 2, [[[5.0], [6.0], [7.0]]])
    assert rows == [[[1 / 2, 1 / 2, 0], [pytest.approx(1 / 3)] * 3]] * 2
    assert prefix_of(rows, 2) == [[[1 / 2], [pytest.approx(1 / 3)]]] * 2


def test_attention_is_scaled_and_reads_the_key_of_its_group() -> None:
    query = [[LOG3 * 2, 0.0, 0.0, 0.0]]
    first, second = [[1.0, 0, 0, 0], [0.0, 0, 0, 0]], [[0.0, 0, 0, 0], [1.0, 0, 0, 0]]
    rows = causal_attention([query] * 4, [first, second])
    assert rows == [[pytest.approx([3 / 4, 1 / 4])]] * 2 + [[pytest.approx([1 / 4, 3 / 4])]] * 2


def test_h2o_in_one_chunk_sums_what_single_tokens_sum() -> None:
    chunk = h2o.step(h2o.nothing(2), worked.H2O_PROMPT, 0, heavy=5, recent=0)
    held: h2o.Held = h2o.nothing(2)
    for at in range(5):
        rows = [[rows[at][: at + 1]] for rows in worked.H2O_PROMPT]
        held = h2o.step(held, rows, at, heavy=5, recent=0)
    for together, single in zip(chunk, held, strict=True):
        assert dict(together) == pytest.approx(dict(single))


def test_h2o_recent_tokens_take_no_place_of_a_heavy_one() -> None:
    assert h2o.evicted([(0, 0.1), (1, 0.2), (2, 0.1), (3, 9.0)], 1, 1) == [(1, 0.2), (3, 9.0)]


def test_streaming_llm_makes_no_room_where_there_is_some() -> None:
    assert streaming_llm.kept_for(5, 3, 4, 4) == [0, 1, 2, 3, 4]
    assert streaming_llm.kept_for(12, 5, 4, 4) == [0, 1, 2, 3]


def test_pyramidkv_ends() -> None:
    assert pyramidkv.prefix_tokens(24, 4, 20, 5) == [16] * 5, "shorter than the capacity: all of it"
    assert pyramidkv.prefix_tokens(24, 4, 39, 5) == [20] * 5, "shorter than twice the mean: equal layers"
    assert pyramidkv.prefix_tokens(24, 4, 42, 5) == [38, 29, 20, 11, 2], "the first layer has no more than there is"
    assert pyramidkv.tokens(20, 2, 40, 5) == [38, 29, 20, 11, 2]
    assert pyramidkv.prefix_tokens(24, 4, 200, 1) == [20] == pyramidkv.tokens(20, 4, 200, 1)


def test_the_floor_that_counts_the_window() -> None:
    scores = [[0.9, 0.8, 0.7, 0.6], [0.1, 0.05, 0.02, 0.01]]
    assert adakv.kept_floored(scores, 1, 3, Fraction(2, 3)) == [[0, 1, 2, 4], [0, 4]]


def test_the_floor_before_the_window_holds_where_the_floor_that_counts_it_does_not() -> None:
    scores = [[0.9, 0.8, 0.7, 0.6], [0.1, 0.05, 0.02, 0.01]]
    third = Fraction(1, 3)
    assert adakv.kept_floored_before_window(scores, 1, Fraction(3, 5), third) == [[0, 1, 2, 4], [0, 4]]
    assert adakv.kept_floored(scores, 1, 3, third) == [[0, 1, 2, 3, 4], [4]]


def test_floor_and_window_beyond_the_budget_go_by_position() -> None:
    scores = snapkv.scores(worked.ATTENTION, worked.KV_HEADS, worked.KERNEL)
    kept = adakv.kept_floored_before_window(scores, worked.WINDOW, Fraction(3, 8), Fraction(7, 10))
    assert kept == [[1, 2, 6], [0, 1, 6]]


def test_adakv_keeps_all_of_a_short_prompt() -> None:
    assert adakv.kept_blended([[1, 2], [2, 1]], 1, 4, Fraction(3, 10)) == [[0, 1, 2], [0, 1, 2]]


def test_projected_norms_are_a_mean_over_the_group() -> None:
    projection = [[1, 0, 1, 1], [0, 1, 4, 0]]  # [hidden][two heads of two channels]
    assert criticalkv.projected_norms([[[1, -2], [0, 1]]], projection) == [[(3 + 5) / 2, (1 + 1) / 2]]
    assert criticalkv.projected_norms([[[1, -2]], [[1, 0]]], projection) == [[3], [5]]
    assert criticalkv.projected_norms([[[1]], [[10]]], [[1, 2, 3, 4]]) == [[(1 + 2) / 2], [(30 + 40) / 2]]


def test_criticalkv_under_adakv() -> None:
    scores = snapkv.scores(worked.ATTENTION, worked.KV_HEADS, worked.KERNEL)
    # Budgets 6 and 4. First 3 and 2: the window and, in the first head, token 1. The rest by score times norm.
    assert criticalkv.kept_ranked_floored(scores, worked.NORMS, worked.WINDOW, 5) == [[1, 2, 3, 4, 6, 7], [1, 2, 6, 7]]
    norms = [row[: -worked.WINDOW] for row in worked.NORMS]
    assert criticalkv.kept_within(scores, norms, worked.WINDOW, [4, 2]) == [[1, 2, 3, 4, 6, 7], [1, 2, 6, 7]]


def test_criticalkv_under_adakv_takes_both_stages_within_each_budget() -> None:
    scores = [[0.9, 0.8, 0.7, 0.6], [0.65, 0.05, 0.02, 0.01]]
    norms = [[0.1, 1.0, 1.0, 9.0, 1.0], [1.0, 1.0, 1.0, 99.0, 1.0]]
    # Budgets 4 and 2. Token 0 of the first head is in the first stage; without a floor that of the second is not.
    assert criticalkv.kept_ranked_floored(scores, norms, 1, 3, floor=0) == [[0, 1, 3, 4], [3, 4]]
    assert criticalkv.kept_ranked_floored(scores, norms, 1, 3, floor=Fraction(2, 3)) == [[0, 1, 3, 4], [0, 4]]


def test_defensivekv_cap_ends_at_zero() -> None:
    assert defensivekv.cap(6, Fraction(1, 8), 2) == 0
    assert defensivekv.first_stage(worked.ATTENTION, worked.KV_HEADS, 0.0, 0) == [[], []]


def test_defensivekv_first_stage_ends_before_the_threshold_is_crossed() -> None:
    # Masses of the tokens, best first: .5, .8, 1.0; the third crosses .9, the second crosses .75.
    prefix = [[[0.4, 0.25, 0.1]], [[0.4, 0.23, 0.22]]]
    assert defensivekv.first_stage(prefix, 1, 0.0, 3) == [[0, 1]]
    assert defensivekv.first_stage(prefix, 1, 0.15, 3) == [[0]]


def test_keydiff_and_keynorm() -> None:
    own = [[[1, 0], [0, 2], [4, 0]]]
    assert keys.keydiff(own) == [pytest.approx([-2 / math.sqrt(5), -1 / math.sqrt(5), -2 / math.sqrt(5)])]
    assert keys.keynorm(own) == [[-1, -2, -4]]


def test_kvzip_takes_the_most_over_the_group_and_the_repeat() -> None:
    chunk, sinks, own = [[[1.0], [0.0]]], [[[0.0]]], [[[0.0], [9.0]]]
    # The first query sees one key of the repeat, the second two, and nobody sees more.
    assert kvzip.importance([[[0.0], [0.0]]], chunk, own, sinks) == [pytest.approx([1 / 4, 1 / 4])]
    queries = [[[LOG3], [0.0]], [[-LOG3], [0.0]]]
    assert kvzip.importance(queries, chunk, own, sinks) == [pytest.approx([3 / 6, 3 / 10])]
    still: list[list[list[float]]] = [[[0.0], [0.0]]] * 2
    both = kvzip.importance([*queries, *still], chunk * 2, own * 2, sinks * 2)
    assert both == [pytest.approx([3 / 6, 3 / 10]), pytest.approx([1 / 4, 1 / 4])]
    assert kvzip.attention([LOG3 * 2, 0, 0, 0], [], [[1, 0, 0, 0], [0] * 4], []) == pytest.approx([3 / 4, 1 / 4])
    assert kvzip.with_sinks([[0.5, 0.2, 0.1]], 1) == [[1.0, 0.2, 0.1]]


def test_mean_rotation() -> None:
    assert expected_attention.mean_rotation([math.pi / 2], [0, 1]) == [
        pytest.approx([1 / 2, -1 / 2]),
        pytest.approx([1 / 2, 1 / 2]),
    ]


def test_expected_attention_of_queries_that_spread() -> None:
    queries, still = [[1.0, 0.0], [-1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]
    own = [[2.0, 0.0], [0.0, 5.0]]
    share = math.e / (math.e + 1)  # logits 2 * 2 * 1 / (2 * 2) and 0
    assert expected_attention.expected(queries, own, still) == pytest.approx([share, 1 - share])
    assert expected_attention.without_spread(queries, own, still) == pytest.approx([1 / 2, 1 / 2])
    quarter = [[0.0, -1.0], [1.0, 0.0]]
    # Turned by a quarter, the queries spread along the second channel: logits 0 and 25 / 4.
    assert expected_attention.expected(queries, own, quarter)[0] == pytest.approx(1 / (1 + math.exp(25 / 4)))


def test_expected_attention_of_one_query() -> None:
    still = [[1.0, 0.0], [0.0, 1.0]]
    query = [math.sqrt(2) * LOG3, 0.0]
    both = expected_attention.expected([query, query], [[1.0, 0.0], [0.0, 0.0]], still)
    assert both == pytest.approx([3 / 4, 1 / 4]) == expected_attention.without_spread([query], [[1, 0], [0, 0]], still)


def test_expected_attention_leaves_sinks_out_and_gives_them_the_most() -> None:
    queries = [[[9.0, 9.0], [0.0, 0.0], [0.0, 0.0]]] * 2
    cached = [[[9.0, 9.0], [1.0, 0.0], [0.0, 1.0]]]
    values = [[[9.0, 9.0], [3.0, 4.0], [0.0, 2.0]]]
    result = expected_attention.scores(queries, cached, values, [1.0], sinks=1, future=4)
    assert result == [pytest.approx([5 / 2, 5 / 2, 1])]
    shifted = expected_attention.scores(queries, cached, values, [1.0], sinks=1, future=4, epsilon=0.5)
    assert shifted == [pytest.approx([5, 5, 2])]


def test_expected_attention_reads_the_keys_of_its_group() -> None:
    queries = [[[math.sqrt(2) * LOG3, 0.0]]] * 4
    cached = [[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0]]]
    values = [[[1.0, 0.0]] * 2] * 2
    result = expected_attention.scores(queries, cached, values, [0.0], sinks=0, future=1)
    assert result == [pytest.approx([3 / 4, 1 / 4]), pytest.approx([1 / 4, 3 / 4])]


def test_expected_attention_looks_from_the_end_of_the_prompt() -> None:
    queries, cached = [[[1.0, 0.0]] * 3], [[[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]]
    values = [[[1.0, 0.0]] * 3]
    # One position to come, 3: the query turns by 3 * pi / 2 and points along the second channel, backwards.
    result = expected_attention.scores(queries, cached, values, [math.pi / 2], sinks=0, future=1)[0]
    low = math.exp(-1 / math.sqrt(2))
    assert result == pytest.approx([low / (low + 2), 1 / (low + 2), 1 / (low + 2)])
