"""Chance, that can be repeated."""

from typing import Any

import pytest
import torch

from qevict.errors import PolicyError
from qevict.testing import ScorerContract
from qevict_baselines.random_scores import RandomScores
from tests.baselines.shown import ranked, windows


class TestRandomScores(ScorerContract):
    examples = 8
    part = RandomScores()


def test_numbers_lie_evenly_and_say_nothing_of_positions() -> None:
    found = ranked(RandomScores(), [], windows(1, 4000))[0]
    assert 0 <= found.min() <= found.max() < 1
    assert torch.histc(found, 10, 0, 1).sub(400).abs().max() < 80
    assert torch.corrcoef(torch.stack((found, torch.arange(4000.0))))[0, 1].abs() < 0.05
    assert torch.corrcoef(torch.stack((found[1:], found[:-1])))[0, 1].abs() < 0.05
    assert len(found.unique()) > 3990


def test_another_seed_gives_other_numbers() -> None:
    several = torch.stack([ranked(RandomScores(seed), [], windows(1, 4000))[0] for seed in (0, 1, 2, -5, 2**40)])
    apart = torch.corrcoef(several) - torch.eye(5)
    assert apart[:4, :4].abs().max() < 0.06


@pytest.mark.parametrize("seed", ["a", 1.5, True, None])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(PolicyError, match="seed is a whole number, got"):
        RandomScores(seed)
