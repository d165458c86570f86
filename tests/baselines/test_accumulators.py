"""Masses that fade, are forgotten, or count by who could see."""

import pytest
import torch

from qevict.errors import PolicyError
from qevict.scorers.cumulative import CumulativeAttention
from qevict.testing import ScorerContract
from qevict_baselines.accumulators import DecayedAttention, NormalisedAttention
from tests.baselines import worked
from tests.baselines.shown import close, looked, ranked, windows
from tests.baselines.slow import h2o


class TestDecayedAttention(ScorerContract):
    examples = 8
    part = DecayedAttention()


class TestWindowedAttention(ScorerContract):
    examples = 8
    part = DecayedAttention(decay=0.0, prompt_queries=3, observe_tokens=2)


class TestNormalisedAttention(ScorerContract):
    examples = 8
    part = NormalisedAttention()


def test_the_sum_fades_where_a_period_begins() -> None:
    """By hand: a period of two forwards, then the first of the next, in the first lane; the second has no event."""
    one = torch.ones(2, 3, 1)
    begins, nothing = torch.tensor([True, False]), torch.tensor([False, False])
    seen = [looked(one), looked(one, first=begins), looked(one, first=nothing), looked(one, first=begins)]
    close(ranked(DecayedAttention(0.5), seen, windows(2, 1)), [[(0.5 + 2) * 0.5 + 1], [4.0]])
    close(ranked(DecayedAttention(0.0), seen, windows(2, 1)), [[1.0], [4.0]])


def test_without_decay_it_is_cumulative_attention() -> None:
    masses = torch.rand(3, 2, 4, 5, generator=torch.Generator().manual_seed(1))
    seen = [looked(mass, stands_for=2.0, first=torch.tensor([True, False])) for mass in masses]
    wanted = ranked(CumulativeAttention(), seen, windows(2, 5))
    close(ranked(DecayedAttention(1.0), seen, windows(2, 5)), wanted)


def test_the_average_of_the_worked_example() -> None:
    """Algorithms notes, section 3: NVIDIA's kvpress divides by the number of queries that see the key."""
    prompt = looked(torch.tensor(worked.H2O_PROMPT).sum(dim=1)[:, None], ends_prompt=True)
    close(ranked(NormalisedAttention(), [prompt], windows(2, 5)), worked.H2O_KVPRESS_AVERAGES, 6e-4)
    by_row = looked(torch.tensor(worked.H2O_PROMPT).sum(dim=1)[None], ends_prompt=True)
    found = ranked(NormalisedAttention(), [by_row], windows(1, 5))
    assert sorted(found[0].topk(4).indices.tolist()) == worked.H2O_KVPRESS_GROUP_MEAN_KEPT_4


def test_the_average_is_the_slow_one() -> None:
    causal = torch.rand(3, 7, 7, generator=torch.Generator().manual_seed(2)).tril()
    found = ranked(NormalisedAttention(), [looked(causal.sum(dim=1)[:, None])], windows(3, 7))
    close(found, h2o.averages(causal.tolist()))


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_sum_cannot_grow_by_fading(decay: float) -> None:
    with pytest.raises(
        PolicyError, match=r"decay is the share of the sum that a period leaves, from 0 \(forget\) to 1"
    ):
        DecayedAttention(decay)
