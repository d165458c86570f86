"""Recency: the later window ranks higher, and nothing is remembered."""

import torch

from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Observation, Windows
from qevict.scorers.recency import Recency

CPU = torch.device("cpu")


def windows_at(positions: torch.Tensor) -> Windows:
    everywhere = torch.ones_like(positions, dtype=torch.bool)
    counts, lengths = (positions.shape[1],) * len(positions), torch.full((len(positions),), 900)
    return Windows(positions, everywhere, everywhere, torch.zeros_like(positions), counts, lengths=lengths)


def test_later_is_better_whatever_the_columns() -> None:
    positions = torch.tensor([[21, 5, 13], [5, 21, 13]])
    scores = Recency().rank({}, windows_at(positions))[IMPORTANCE]
    assert scores.argsort(dim=1, descending=True).tolist() == [[0, 2, 1], [1, 2, 0]]


def test_far_positions_stay_apart_in_fp32() -> None:
    """C15: integers above 256 do not exist in bf16, above 2048 not in fp16."""
    positions = torch.arange(2**20, 2**20 + 4000)[None]
    scores = Recency().rank({}, windows_at(positions))[IMPORTANCE]
    assert scores.dtype == torch.float32
    assert bool((scores.diff(dim=1) == 1).all())
    assert scores[0, -1] == 2**20 + 3999


def test_it_needs_nothing_and_remembers_nothing() -> None:
    scorer = Recency()
    assert scorer.needs == frozenset()
    state = scorer.start(2, 3, CPU)
    assert dict(state) == {}
    assert dict(scorer.update(state, Observation(torch.zeros(2, 1, dtype=torch.int64), 3))) == {}


def test_ranking_is_pure() -> None:
    positions = torch.tensor([[21, 5, 13]])
    windows = windows_at(positions)
    first = Recency().rank({}, windows)[IMPORTANCE]
    first += 1
    assert positions.tolist() == [[21, 5, 13]]
    assert Recency().rank({}, windows)[IMPORTANCE].tolist() == [[21.0, 5.0, 13.0]]
    assert Recency() == Recency()
    assert hash(Recency()) == hash(Recency())


def test_the_streaming_example() -> None:
    """StreamingLLM (arXiv 2309.17453): of 12 tokens, 4 sinks and the 4 last stay, with windows of one token.

    Sinks and one recent token are protected by every policy; the ranking has to bring the three before it.
    """
    aged = torch.arange(4, 11)[None]
    everywhere = torch.ones_like(aged, dtype=torch.bool)
    windows = Windows(aged, everywhere, everywhere, torch.zeros_like(aged), (7,), lengths=torch.tensor([12]))
    scores = Recency().rank(Recency().start(1, 7, torch.device("cpu")), windows)[IMPORTANCE][0]
    assert sorted(aged[0][scores.topk(3).indices].tolist()) == [8, 9, 10]
