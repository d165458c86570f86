"""The ledger without a memory, as a rule and in an engine."""

import itertools

import pytest
import torch

from qevict.contracts.values import PROTECTED
from qevict.ledgers.re_encoding import ReEncoding


@pytest.mark.parametrize("tiers", [1, 2, 3, 4])
def test_the_codes_of_its_own_tier_stay_and_no_others(tiers: int) -> None:
    """All cases: each set of codes that a window can hold, with each place that it can take."""
    rows = [*itertools.product(itertools.product([False, True], repeat=tiers), range(PROTECTED, tiers + 1))]
    held, place = torch.tensor([own for own, _ in rows]), torch.tensor([to for _, to in rows])
    retained = ReEncoding().retain(held, place, tiers)
    assert retained.tolist() == [[own[tier] and tier == to for tier in range(tiers)] for own, to in rows]
