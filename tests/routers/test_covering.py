"""Cover first, then lift."""

import pytest
import torch

from qevict.contracts.values import PROTECTED, Costs, Windows
from qevict.errors import PolicyError
from qevict.routers.covering import CoverFirst


def places(
    scores: list[float], capacity: int | None, costs: Costs
) -> tuple[list[int], tuple[tuple[int, ...], ...] | None]:
    """Where the windows of one lane go."""
    count = len(scores)
    positions, there = torch.arange(count)[None], torch.ones(1, count, dtype=torch.bool)
    place = torch.full((1, count), PROTECTED)
    windows = Windows(positions, there, there, place, (count,), lengths=torch.tensor([count]))
    plan = CoverFirst().plan({"importance": torch.tensor([scores])}, windows, costs, [capacity])
    return plan.place[0].tolist(), plan.counts


SCORES = [9.0, 1.0, 5.0, 7.0, 3.0, 2.0]


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (None, [0, 0, 0, 0, 0, 0]),
        (0, [2, 2, 2, 2, 2, 2]),
        (25, [1, 2, 2, 1, 2, 2]),  # two codes fit, and nothing is left to lift
        (69, [1, 1, 1, 1, 1, 1]),
        (99, [1, 1, 1, 1, 1, 1]),  # 39 left over lift nobody
        (100, [0, 1, 1, 1, 1, 1]),
        (145, [0, 1, 1, 0, 1, 1]),
        (300, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_what_is_left_over_lifts_the_best(capacity: int | None, expected: list[int]) -> None:
    found, counts = places(SCORES, capacity, Costs((40, 10)))
    assert found == expected
    assert counts == (tuple(expected.count(tier) for tier in (0, 1)),)


def test_codes_that_are_kept_are_paid_for_and_cost_nobody_a_place() -> None:
    """Three windows keep codes; two of them are lifted: 2 x 40 + 2 x 10 + 4 x 10 of 140."""
    kept = torch.zeros(1, 6, 2, dtype=torch.bool)
    kept[0, [0, 3, 4], 1] = True
    assert places(SCORES, 140, Costs((40, 10), kept))[0] == [0, 1, 1, 0, 1, 1]


def test_one_tier_is_filled() -> None:
    assert places(SCORES, 90, Costs((40,)))[0] == [0, 1, 1, 0, 1, 1]


def test_more_tiers_are_refused() -> None:
    with pytest.raises(PolicyError, match="got 3 tiers"):
        CoverFirst().check(3)
