"""Short keys."""

import torch

from qevict.contracts.values import Observation
from qevict.testing import ScorerContract
from qevict_baselines.keynorm import ShortKeys
from tests.baselines.shown import close, ranked, windows
from tests.baselines.slow.keys import keynorm


class TestShortKeys(ScorerContract):
    examples = 8
    part = ShortKeys()


def test_it_is_the_slow_one() -> None:
    keys = torch.randn(2, 1, 6, 8, generator=torch.Generator().manual_seed(0))
    columns = torch.tensor([[-1, 0, 1, 2, 3, 4]] * 2)
    found = ranked(ShortKeys(), [Observation(columns, 5, keys=keys)], windows(2, 5))
    close(found, [row[1:] for row in keynorm(keys[:, 0].tolist())])


def test_a_lane_of_several_heads_takes_their_mean() -> None:
    keys = torch.tensor([[[[3.0, 4.0]], [[0.0, 1.0]]]])
    close(ranked(ShortKeys(), [Observation(torch.tensor([[0]]), 1, keys=keys)], windows(1, 1)), [[-3.0]])
