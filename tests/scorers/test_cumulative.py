"""The accumulated attention score: pure, fp32, averaged over query heads, never forgotten."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qevict.contracts.scorer import IMPORTANCE, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.errors import PolicyError
from qevict.scorers.cumulative import CumulativeAttention

CPU = torch.device("cpu")


def observed(mass: Tensor, stands_for: float = 1.0) -> Observation:
    lanes, _, windows = mass.shape
    columns = torch.zeros(lanes, 1, dtype=torch.int64)
    return Observation(columns=columns, windows=windows, mass=mass, stands_for=stands_for)


def windows_of(lanes: int, windows: int) -> Windows:
    everywhere = torch.ones(lanes, windows, dtype=torch.bool)
    positions = (5 + 8 * torch.arange(windows)).expand(lanes, windows)
    return Windows(
        positions,
        everywhere,
        everywhere,
        torch.zeros_like(positions),
        (windows,) * lanes,
        lengths=torch.full((lanes,), 900),
    )


def rank(scorer: CumulativeAttention, state: State) -> Tensor:
    return scorer.rank(state, windows_of(*state["mass"].shape))[IMPORTANCE]


def masses(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_nothing_seen_is_nothing_scored() -> None:
    state = CumulativeAttention().start(2, 3, CPU)
    assert {name: tensor.dtype for name, tensor in state.items()} == {"mass": torch.float32}
    assert rank(CumulativeAttention(), state).tolist() == [[0.0] * 3] * 2


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5), st.integers(0, 6), st.integers(0, 2**31))
@settings(deadline=None, max_examples=50)
def test_the_score_is_the_sum_over_forwards_of_the_mean_over_heads(
    lanes: int, heads: int, windows: int, forwards: int, seed: int
) -> None:
    """Every forward counts the same: the prompt's first and the last token's."""
    scorer, seen = CumulativeAttention(), masses(forwards, lanes, heads, windows, seed=seed)
    state = scorer.start(lanes, windows, CPU)
    for mass in seen:
        state = scorer.update(state, observed(mass))
    scores = rank(scorer, state)
    assert scores.dtype == torch.float32
    for lane in range(lanes):
        for window in range(windows):
            total = 0.0
            for forward in range(forwards):
                total += sum(float(seen[forward, lane, head, window]) for head in range(heads)) / heads
            assert float(scores[lane, window]) == pytest.approx(total, rel=1e-5, abs=1e-6)


def test_permuting_the_query_heads_of_a_group_leaves_the_ranks() -> None:
    """Two KV heads with four query heads each: who of a group saw a window does not matter."""
    scorer, mass = CumulativeAttention(), masses(2, 8, 12)
    permuted = mass[:, [3, 1, 0, 2, 6, 7, 5, 4]]
    before, after = (rank(scorer, scorer.update(scorer.start(2, 12, CPU), observed(each))) for each in (mass, permuted))
    torch.testing.assert_close(before, after, rtol=1e-6, atol=0)
    assert torch.equal(before.argsort(1), after.argsort(1))
    # Each head on its own would rank otherwise.
    assert not torch.equal(before.argsort(1), mass[:, 0].argsort(1))


def test_5000_equal_increments_add_up() -> None:
    """C15: in bf16 the sum would stop growing at a few tenths."""
    scorer, increment = CumulativeAttention(), 2.508 / 5000
    state, seen = scorer.start(1, 1, CPU), observed(torch.full((1, 2, 1), increment))
    for _ in range(5000):
        state = scorer.update(state, seen)
    assert float(rank(scorer, state)) == pytest.approx(2.508, rel=1e-3)
    assert state["mass"].dtype == torch.float32


def test_small_increments_still_count_after_a_long_prompt() -> None:
    scorer, seen = CumulativeAttention(), observed(torch.full((1, 1, 1), 0.01))
    state: State = scorer.update(scorer.start(1, 1, CPU), observed(torch.full((1, 1, 1), 1000.0)))
    for _ in range(1000):
        state = scorer.update(state, seen)
    assert float(rank(scorer, state)) == pytest.approx(1010, rel=1e-4)


def test_it_asks_for_masses_of_all_prompt_queries_unless_told() -> None:
    assert CumulativeAttention().needs == {Need.MASS}
    assert CumulativeAttention().prompt_queries is None
    assert CumulativeAttention(prompt_queries=32).prompt_queries == 32
    assert CumulativeAttention(32) == CumulativeAttention(prompt_queries=32) != CumulativeAttention()
    assert hash(CumulativeAttention(32)) == hash(CumulativeAttention(32))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        CumulativeAttention().prompt_queries = 3  # type: ignore[misc]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("queries", [0, -1, 1.5, True, False, "32"])
def test_an_impossible_number_of_prompt_queries_is_refused(queries: Any) -> None:
    with pytest.raises(PolicyError, match=r"prompt_queries is None \(all\) or at least 1, got"):
        CumulativeAttention(prompt_queries=queries)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("stride", [0, -1, 1.5, True, None, "4"])
def test_an_impossible_stride_is_refused(stride: Any) -> None:
    with pytest.raises(PolicyError, match=r"prompt_stride is a whole number of at least 1, got"):
        CumulativeAttention(prompt_stride=stride)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "4"])
def test_an_impossible_number_of_observed_tokens_is_refused(tokens: Any) -> None:
    with pytest.raises(PolicyError, match=r"observe_tokens is None \(all\) or at least 1, got"):
        CumulativeAttention(observe_tokens=tokens)


def test_a_query_counts_as_often_as_it_stands_for_others() -> None:
    """A prompt by every 4th query, then two steps that are looked at for eight."""
    scorer = CumulativeAttention(prompt_stride=4, observe_tokens=2)
    state = scorer.start(1, 2, CPU)
    state = scorer.update(state, observed(torch.tensor([[[3.0, 1.0], [1.0, 2.0]]]), 4))
    state = scorer.update(state, observed(torch.tensor([[[0.5, 0.25], [0.5, 0.75]]]), 8 / 2))
    assert rank(scorer, state).tolist() == [[4 * 2.0 + 4 * 0.5, 4 * 1.5 + 4 * 0.5]]


def test_a_query_that_stands_for_itself_counts_to_the_last_bit_as_before() -> None:
    scorer, mass = CumulativeAttention(), masses(2, 3, 50)
    state = {"mass": masses(2, 50, seed=1)}
    assert torch.equal(scorer.update(state, observed(mass))["mass"], state["mass"] + mass.mean(dim=1))


def test_the_h2o_example() -> None:
    """H2O (arXiv 2306.14048): five prompt tokens and one step, two heads that route apart, windows of one token.

    Two heavy hitters beside the two recent tokens; hand-checked column sums and kept sets.
    """
    scorer = CumulativeAttention()
    prompt = torch.tensor([[2.0, 1.5, 0.9, 0.4, 0.2], [3.0, 0.4, 1.1, 0.3, 0.2]])
    state = scorer.update(scorer.start(2, 5, CPU), observed(prompt[:, None]))
    torch.testing.assert_close(rank(scorer, state), prompt)
    assert heavy_hitters(rank(scorer, state)) == [[0, 1], [0, 2]]
    # The survivors carry their sums into the next step; a sixth token comes with nothing.
    kept = torch.tensor([[0, 1, 3, 4], [0, 2, 3, 4]])
    carried = {"mass": torch.cat((state["mass"].gather(1, kept), torch.zeros(2, 1)), 1)}
    step = torch.tensor([[0.10, 0.10, 0.50, 0.10, 0.20], [0.10, 0.50, 0.10, 0.20, 0.10]])
    after = rank(scorer, scorer.update(carried, observed(step[:, None])))
    torch.testing.assert_close(after, torch.tensor([[2.1, 1.6, 0.9, 0.3, 0.2], [3.1, 1.6, 0.4, 0.4, 0.1]]))
    assert heavy_hitters(after) == [[0, 1], [0, 1]]


def heavy_hitters(scores: Tensor) -> list[list[int]]:
    """The two best of all but the two recent tokens, by head."""
    best: list[list[int]] = scores[:, :-2].topk(2).indices.sort().values.tolist()
    return best
