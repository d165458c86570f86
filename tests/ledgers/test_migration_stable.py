"""The migration-stable ledger: first codes are kept through every later move, and paid for."""

import itertools

import pytest
import torch

from qevict.contracts.values import PROTECTED
from qevict.ledgers.migration_stable import MigrationStable


def every_case(tiers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each set of codes that a window can hold, with each place that it can take."""
    rows = list(itertools.product(itertools.product([False, True], repeat=tiers), range(PROTECTED, tiers + 1)))
    return torch.tensor([held for held, _ in rows]), torch.tensor([place for _, place in rows])


@pytest.mark.parametrize("tiers", [1, 2, 3, 4])
def test_codes_of_its_tier_and_of_colder_ones_stay(tiers: int) -> None:
    """All cases: hotter codes go (they would defeat the demotion), an evicted window keeps none."""
    held, place = every_case(tiers)
    retained = MigrationStable().retain(held, place, tiers)
    assert retained.dtype == torch.bool
    assert retained.shape == held.shape
    for row in range(len(held)):
        for tier in range(tiers):
            hot = max(int(place[row]), 0)
            assert bool(retained[row, tier]) == (bool(held[row, tier]) and tier >= hot)


def test_codes_survive_promotion_and_the_way_back() -> None:
    """Full -> INT2 -> full -> INT2: the codes of the first demotion are there at the second."""
    ledger, held = MigrationStable(), torch.tensor([[False, True]])
    for place in (1, 0, PROTECTED, 0, 1):
        held = ledger.retain(held, torch.tensor([place]), 2)
        assert held.tolist() == [[False, True]]
    assert ledger.retain(held, torch.tensor([2]), 2).tolist() == [[False, False]]
