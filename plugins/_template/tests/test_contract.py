"""The laws of a scorer, on `KeyNorm`."""

import torch
from torch import Tensor

from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Observation, Windows
from qevict_template import KeyNorm

LANES, HEADS, TOKENS, HEAD_DIM, COLUMNS = 3, 2, 12, 4, 3


def observe(dtype: torch.dtype = torch.float32) -> Observation:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(LANES, HEADS, TOKENS, HEAD_DIM, generator=generator).to(dtype)
    columns = torch.arange(-1, TOKENS - 1).div(4, rounding_mode="floor").expand(LANES, -1)
    return Observation(columns=columns, windows=COLUMNS, keys=keys)


def rank(observation: Observation) -> Tensor:
    scorer, device = KeyNorm(), torch.device("cpu")
    lanes, columns = observation.columns.shape[0], observation.windows
    state = scorer.update(scorer.start(lanes, columns, device), observation)
    filled = torch.ones(lanes, columns, dtype=torch.bool)
    positions = torch.arange(columns).mul(4).expand(lanes, -1)
    windows = Windows(positions, filled, filled, torch.zeros_like(positions), (columns,) * lanes)
    return scorer.rank(state, windows)[IMPORTANCE]


def test_the_window_with_the_shortest_keys_ranks_highest() -> None:
    observation = observe()
    assert observation.keys is not None
    observation.keys[:, :, observation.columns[0] == 1] *= 0.01
    assert rank(observation).argmax(dim=1).tolist() == [1] * LANES


def test_scores_are_fp32_and_pure() -> None:
    observation = observe(torch.bfloat16)
    assert observation.keys is not None
    before = observation.keys.clone()
    assert torch.equal(rank(observation), rank(observation))
    assert torch.equal(observation.keys, before)
    assert rank(observation).dtype == torch.float32


def test_an_update_leaves_the_old_state_alone() -> None:
    old = KeyNorm().start(LANES, COLUMNS, torch.device("cpu"))
    KeyNorm().update(old, observe())
    assert not old["norm"].any()


def test_lanes_are_strangers() -> None:
    both = observe()
    assert both.keys is not None
    alone = Observation(columns=both.columns[1:2], windows=COLUMNS, keys=both.keys[1:2])
    assert torch.equal(rank(both)[1:2], rank(alone))


def test_columns_and_unscored_tokens_do_not_matter() -> None:
    seen = observe()
    assert seen.keys is not None
    order = torch.tensor([2, 0, 1])
    moved = torch.where(seen.columns < 0, -1, order[seen.columns])
    keys = seen.keys.clone()
    keys[:, :, seen.columns[0] < 0] = 1e6
    there = rank(Observation(columns=moved, windows=COLUMNS, keys=keys))
    assert torch.equal(there[:, order], rank(seen))
