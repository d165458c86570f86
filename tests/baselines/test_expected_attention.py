"""Expected attention of queries to come."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qevict.contracts.rotary import Rotary
from qevict.contracts.values import Observation
from qevict.testing import ScorerContract
from qevict_baselines.expected_attention import ExpectedAttention
from tests.baselines.shown import close, kept, ranked, windows
from tests.baselines.slow import expected_attention as slow
from tests.baselines.slow.basics import group_mean

KV_HEADS, GROUP, LENGTH, SINKS, FUTURE = 2, 2, 12, 3, 40
FREQUENCIES = torch.tensor([1.0, 0.3, 0.1])


class TestExpectedAttention(ScorerContract):
    examples = 8
    part = ExpectedAttention()


class TestExpectedAttentionPlain(ScorerContract):
    examples = 8
    part = ExpectedAttention(prompt_queries=4, sink_tokens=0, use_covariance=False, use_value_norm=False, epsilon=0.1)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


QUERIES = 1.5 * drawn(0, KV_HEADS, 1, GROUP, LENGTH, 6) + 0.5
KEYS, VALUES = drawn(1, KV_HEADS, 1, LENGTH, 6), drawn(2, KV_HEADS, 1, LENGTH, 6)


def fast(scorer: ExpectedAttention, last: int = LENGTH, rotary: Rotary | None = None, ahead: int = 0) -> Tensor:
    """Of lanes of one KV head; keys are what they are at their positions, queries are before RoPE."""
    table = rotary or Rotary(FREQUENCIES)
    asked = torch.arange(LENGTH).expand(KV_HEADS, -1)
    held = kept(KEYS, VALUES, SINKS)
    held = type(held)(held.keys, held.values, held.positions, held.rotary_positions + ahead, held.columns)
    seen = Observation(
        torch.full((KV_HEADS, 1), -1),
        LENGTH - SINKS,
        ends_prompt=True,
        queries=table.rotate(QUERIES, asked[:, None, None] + ahead)[..., LENGTH - last :, :],
        asked=asked[:, LENGTH - last :],
        held=held,
        rotary=table,
    )
    return ranked(scorer, [seen], windows(KV_HEADS, LENGTH - SINKS))


def heads() -> list[tuple[list[list[float]], list[list[float]]]]:
    """Of each query head: its queries, and the keys behind the sinks that it reads."""
    keys = KEYS[:, 0, SINKS:].repeat_interleave(GROUP, dim=0)
    return list(zip(QUERIES[:, 0].flatten(0, 1).tolist(), keys.tolist(), strict=True))


def of(**options: Any) -> ExpectedAttention:
    return ExpectedAttention(sink_tokens=SINKS, future_tokens=FUTURE, **options)


@pytest.mark.parametrize("epsilon", [0.0, 0.05])
def test_it_is_the_slow_one(epsilon: float) -> None:
    wanted = slow.scores(
        QUERIES[:, 0].flatten(0, 1).tolist(),
        KEYS[:, 0].tolist(),
        VALUES[:, 0].tolist(),
        FREQUENCIES.tolist(),
        SINKS,
        FUTURE,
        epsilon,
    )
    close(fast(of(epsilon=epsilon)), [row[SINKS:] for row in wanted], 2e-5)


def test_its_options_are_the_slow_ones() -> None:
    """Without covariance, without values, and of the last queries alone."""
    rotation = slow.mean_rotation(FREQUENCIES.tolist(), range(LENGTH, LENGTH + FUTURE))
    rows = [
        slow.without_spread(
            QUERIES[head // GROUP, 0, head % GROUP, -5:].tolist(), KEYS[head // GROUP, 0, SINKS:].tolist(), rotation
        )
        for head in range(KV_HEADS * GROUP)
    ]
    found = fast(of(prompt_queries=5, use_covariance=False, use_value_norm=False), last=5)
    close(found, group_mean(rows, KV_HEADS), 2e-5)


def test_an_amplitude_counts_once_as_the_model_has_it() -> None:
    """Queries come scaled by it, and so do those to come."""
    louder = Rotary(FREQUENCIES, amplitude=1.5)
    queries = (QUERIES[:, 0].flatten(0, 1) * 1.5).tolist()
    wanted = slow.scores(queries, KEYS[:, 0].tolist(), VALUES[:, 0].tolist(), FREQUENCIES.tolist(), SINKS, FUTURE)
    close(fast(of(), rotary=louder), [row[SINKS:] for row in wanted], 2e-5)


def test_positions_of_padded_rows_are_their_rotary_ones() -> None:
    """Everything, what is to come included, is turned further by as much."""
    ahead = 7
    rotation = slow.mean_rotation(FREQUENCIES.tolist(), range(LENGTH + ahead, LENGTH + ahead + FUTURE))
    rows = [
        slow.expected(
            QUERIES[head // GROUP, 0, head % GROUP, SINKS:].tolist(), KEYS[head // GROUP, 0, SINKS:].tolist(), rotation
        )
        for head in range(KV_HEADS * GROUP)
    ]
    wanted = slow.weighted(group_mean(rows, KV_HEADS), VALUES[:, 0, SINKS:].tolist())
    close(fast(of(), ahead=ahead), wanted, 2e-5)
