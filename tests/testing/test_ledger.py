"""Each law of ledgers is broken by some ledger, and the kit says so."""

import attrs
import torch
from tests.breaking import Break, breaks, laws_of, report
from torch import Tensor

from qevict.ledgers.migration_stable import MigrationStable
from qevict.testing import LedgerContract


@attrs.frozen
class RetainsWhatIsNotHeld(MigrationStable):
    def retain(self, held: Tensor, place: Tensor, tiers: int) -> Tensor:
        return torch.arange(tiers) == place[..., None]


@attrs.frozen
class RemembersTheEvicted(MigrationStable):
    def retain(self, held: Tensor, place: Tensor, tiers: int) -> Tensor:
        return held.clone()


@attrs.frozen
class ForgetsItsOwnTier(MigrationStable):
    def retain(self, held: Tensor, place: Tensor, tiers: int) -> Tensor:
        return held & (torch.arange(tiers) > place[..., None])


@attrs.frozen
class ChangesItsArguments(MigrationStable):
    def retain(self, held: Tensor, place: Tensor, tiers: int) -> Tensor:
        return held.logical_and_(torch.arange(tiers) >= place[..., None])


@attrs.frozen(eq=False)
class Wavers(MigrationStable):
    calls: list[int] = attrs.field(factory=list, repr=False)

    def retain(self, held: Tensor, place: Tensor, tiers: int) -> Tensor:
        self.calls.append(1)
        return super().retain(held, place, tiers) & (len(self.calls) % 2 == 0)


@attrs.frozen
class ReturnsIntegers(MigrationStable):
    def retain(self, held: Tensor, place: Tensor, tiers: int) -> Tensor:
        return super().retain(held, place, tiers).int()


@attrs.frozen
class WantsAFlatTable(MigrationStable):
    def retain(self, held: Tensor, place: Tensor, tiers: int) -> Tensor:
        return held & (torch.arange(tiers) >= place[:, None])


@attrs.frozen
class Synchronises(MigrationStable):
    def retain(self, held: Tensor, place: Tensor, tiers: int) -> Tensor:
        kept = held.clone()
        kept[place == tiers] = False
        return kept


BREAKS = (
    Break(
        "test_only_what_is_held_is_retained", RetainsWhatIsNotHeld(), "holds (False,) and goes to 0 retains codes of"
    ),
    Break(
        "test_an_evicted_window_retains_nothing",
        RemembersTheEvicted(),
        "an evicted window that held (False, True) retains [False, True]",
    ),
    Break("test_codes_of_its_own_tier_stay", ForgetsItsOwnTier(), "in tier 0, of codes (True,) it retains [False]"),
    Break("test_it_is_pure", ChangesItsArguments(), "it changed the codes held"),
    Break("test_it_is_pure", Wavers(), "asked again, it retains others"),
    Break("test_any_leading_axes_do", ReturnsIntegers(), "it returned torch.int32"),
    Break("test_any_leading_axes_do", WantsAFlatTable()),
    Break("test_the_host_never_waits", Synchronises(), "index_put_"),
)


@breaks(*BREAKS)
def test_a_broken_ledger_is_told_which_law_it_breaks(broken: Break) -> None:
    report(LedgerContract, broken)


def test_every_law_is_broken_by_some_ledger() -> None:
    assert {each.law for each in BREAKS} == laws_of(LedgerContract)
