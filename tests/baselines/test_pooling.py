"""Neighbours are neighbours in position."""

import pytest
import torch

from qevict_baselines.pooling import pooled
from tests.baselines.shown import close
from tests.baselines.slow.basics import average_pool, max_pool

SLOW = {"average": average_pool, "max": max_pool}


@pytest.mark.parametrize("pool", ["average", "max"])
@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
@pytest.mark.parametrize("count", [1, 2, 6, 11])
def test_it_pools_candidates_in_order_of_position(pool: str, kernel: int, count: int) -> None:
    """Columns lie in any order; what is not among them is neither taken nor a gap, and gets nothing."""
    draw = torch.Generator().manual_seed(count)
    lanes, others = 3, 4
    amounts = torch.rand(lanes, 2, count + others, generator=draw) - 0.3
    positions = torch.rand(lanes, count + others, generator=draw).argsort(1) * 3
    among = torch.rand(lanes, count + others, generator=draw).argsort(1) < count
    amounts = torch.where(among[:, None] | (torch.rand(amounts.shape, generator=draw) < 0.5), amounts, torch.nan)
    found = pooled(amounts, positions, among, kernel, pool)  # type: ignore[arg-type]
    for lane in range(lanes):
        columns = sorted((c for c in range(count + others) if among[lane, c]), key=lambda c: int(positions[lane, c]))
        for row in range(2):
            close(found[lane, row, columns], SLOW[pool](amounts[lane, row, columns].tolist(), kernel))
            assert found[lane, row][~among[lane]].eq(0).all()


def test_no_windows_are_pooled_into_none() -> None:
    empty = torch.zeros(2, 0)
    assert pooled(empty, empty.long(), empty.bool(), 5, "max").shape == (2, 0)
