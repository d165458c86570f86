"""The laws of a scorer on `KeyNorm`, and what it is for."""

import torch

from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Observation, Windows
from qevict.testing import ScorerContract
from qevict_template import KeyNorm


class TestKeyNorm(ScorerContract):
    part = KeyNorm()


def test_the_window_with_the_shortest_keys_ranks_highest() -> None:
    columns = torch.tensor([[-1, 0, 0, 1, 1, 2, 2]])  # a sink, then windows of two tokens
    keys = torch.ones(1, 2, 7, 4)
    keys[:, :, columns[0] == 1] *= 0.01
    scorer, everywhere = KeyNorm(), torch.ones(1, 3, dtype=torch.bool)
    state = scorer.update(scorer.start(1, 3, torch.device("cpu")), Observation(columns, windows=3, keys=keys))
    places, lengths = torch.zeros(1, 3).long(), torch.tensor([7])
    windows = Windows(torch.tensor([[1, 3, 5]]), everywhere, everywhere, places, (3,), lengths=lengths)
    assert scorer.rank(state, windows)[IMPORTANCE].argmax(dim=1).tolist() == [1]


def test_tokens_of_no_window_are_not_counted() -> None:
    """Sinks and pads have column -1."""
    keys, nowhere = torch.ones(1, 2, 3, 4), torch.full((1, 3), -1)
    state = KeyNorm().start(1, 2, torch.device("cpu"))
    assert not KeyNorm().update(state, Observation(nowhere, windows=2, keys=keys))["norm"].any()
