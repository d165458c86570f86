"""The migration-stable ledger: first codes are kept through every later move, and paid for."""

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("tiers", [1, 2, 3, 4])
def test_laws(tiers: int) -> None:
    held, place = every_case(tiers)
    retained = MigrationStable().retain(held, place, tiers)
    assert not bool((retained & ~held).any()), "only what is held can be retained"
    assert not bool(retained[place == tiers].any()), "an evicted window retains nothing"
    lives = (place >= 0) & (place < tiers)
    own = place[lives][:, None]
    assert torch.equal(retained[lives].gather(1, own), held[lives].gather(1, own)), "codes of its own tier stay"


def test_codes_survive_promotion_and_the_way_back() -> None:
    """Full -> INT2 -> full -> INT2: the codes of the first demotion are there at the second."""
    ledger, held = MigrationStable(), torch.tensor([[False, True]])
    for place in (1, 0, PROTECTED, 0, 1):
        held = ledger.retain(held, torch.tensor([place]), 2)
        assert held.tolist() == [[False, True]]
    assert ledger.retain(held, torch.tensor([2]), 2).tolist() == [[False, False]]


def test_any_leading_axes_and_small_integers_do() -> None:
    """The engine's table stores places in 8 bits; routers ask by lane and window."""
    held = torch.ones(2, 3, 2, dtype=torch.bool)
    place = torch.tensor([[0, 1, 2], [-1, 1, 0]])
    expected = [[[True, True], [False, True], [False, False]], [[True, True], [False, True], [True, True]]]
    for dtype in (torch.int8, torch.int64):
        assert MigrationStable().retain(held, place.to(dtype), 2).tolist() == expected
    assert MigrationStable().retain(held[:0], place[:0], 2).shape == (0, 3, 2)


def test_pure() -> None:
    held, place = every_case(2)
    before = held.clone(), place.clone()
    first, second = MigrationStable().retain(held, place, 2), MigrationStable().retain(held, place, 2)
    assert torch.equal(first, second)
    assert torch.equal(held, before[0])
    assert torch.equal(place, before[1])
    assert MigrationStable() == MigrationStable()
    assert hash(MigrationStable()) == hash(MigrationStable())


class NoSynchronisation(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        assert name not in {"_local_scalar_dense", "nonzero", "masked_select", "equal"}, name
        return func(*args, **(kwargs or {}))


def test_it_does_not_wait_for_the_device() -> None:
    held, place = every_case(3)
    with NoSynchronisation():  # type: ignore[no-untyped-call]
        MigrationStable().retain(held, place, 3)
