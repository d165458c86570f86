"""The laws of a ledger."""

from typing import ClassVar

import attrs
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from qevict.contracts.ledger import Ledger
from qevict.contracts.values import PROTECTED
from qevict.testing.contract import RegisteredContract, law
from qevict.testing.operators import Operators
from qevict.testing.values import require, same_bits


@attrs.frozen
class LedgerCase:
    """Windows that take a place.

    Attributes:
        tiers: number of tiers.
        windows: for each window, whether it holds codes of each tier, and the place that it takes.
    """

    tiers: int
    windows: tuple[tuple[tuple[bool, ...], int], ...]

    def held(self) -> Tensor:
        """``[windows, tiers]``."""
        return torch.tensor([held for held, _ in self.windows], dtype=torch.bool)

    def place(self) -> Tensor:
        """``[windows]``."""
        return torch.tensor([place for _, place in self.windows], dtype=torch.int64)


def _of_tiers(tiers: int) -> SearchStrategy[LedgerCase]:
    window = st.tuples(st.tuples(*[st.booleans()] * tiers), st.integers(PROTECTED, tiers))
    return st.builds(LedgerCase, st.just(tiers), st.lists(window, min_size=1, max_size=12).map(tuple))


class LedgerContract(RegisteredContract[Ledger, LedgerCase]):
    """The laws of a ledger. One line makes them tests of yours.

    That what is retained is billed is the engine's duty, and not tested here.

    Example:
        ```python
        from qevict.ledgers.migration_stable import MigrationStable
        from qevict.testing import LedgerContract


        class TestMigrationStable(LedgerContract):
            part = MigrationStable()
        ```
    """

    kind: ClassVar[type] = Ledger
    examples: ClassVar[int] = 60

    def cases(self) -> SearchStrategy[LedgerCase]:
        """One to four tiers, any codes held, any place taken."""
        return st.integers(1, 4).flatmap(_of_tiers)

    @law("Pure: neither argument is changed; equal input, equal output.")
    def test_it_is_pure(self, case: LedgerCase) -> None:
        held, place = self._arguments(case)
        first = self.part.retain(held, place, case.tiers).clone()
        require(same_bits(held, case.held()), "it changed the codes held that it was given")
        require(same_bits(place, case.place()), "it changed the places that it was given")
        require(same_bits(self.part.retain(held, place, case.tiers), first), "asked again, it retains others")
        require(same_bits(self.twin().retain(held, place, case.tiers), first), "an equal ledger retains others")

    @law("Pure, and no host synchronisation.")
    def test_the_host_never_waits(self, case: LedgerCase) -> None:
        held, place = self._arguments(case)
        with Operators() as operators:
            self.part.retain(held, place, case.tiers)
        require(not operators.waits, f"it waits for the device: {', '.join(sorted(operators.waits))}")

    @law("What is retained is a flag per window and tier, whatever the leading axes and the integers of the places.")
    def test_any_leading_axes_do(self, case: LedgerCase) -> None:
        """The engine's table is flat and stores places in 8 bits; routers ask by lane and window."""
        held, place = self._arguments(case)
        flat = self.part.retain(held, place, case.tiers)
        require(flat.dtype == torch.bool, f"it returned {flat.dtype}")
        require(flat.shape == held.shape, f"it returned {tuple(flat.shape)} for {tuple(held.shape)}")
        by_lane = self.part.retain(held[None], place[None].to(torch.int8), case.tiers)
        require(same_bits(by_lane, flat[None]), "with a leading axis more and places in 8 bits it retains others")
        none = self.part.retain(held[:0], place[:0], case.tiers)
        require(none.shape == (0, case.tiers), f"of no windows it returned {tuple(none.shape)}")

    @law("Only codes that a window holds can be retained.")
    def test_only_what_is_held_is_retained(self, case: LedgerCase) -> None:
        for (held, place), kept in zip(case.windows, self._retained(case), strict=True):
            extra = [tier for tier in range(case.tiers) if kept[tier] and not held[tier]]
            require(not extra, f"a window that holds {held} and goes to {place} retains codes of tiers {extra}")

    @law("An evicted window retains none.")
    def test_an_evicted_window_retains_nothing(self, case: LedgerCase) -> None:
        for (held, place), kept in zip(case.windows, self._retained(case), strict=True):
            require(place != case.tiers or not any(kept), f"an evicted window that held {held} retains {kept}")

    @law("A window always retains the codes of the tier that it lives in.")
    def test_codes_of_its_own_tier_stay(self, case: LedgerCase) -> None:
        for (held, place), kept in zip(case.windows, self._retained(case), strict=True):
            lives = 0 <= place < case.tiers
            require(not lives or kept[place] == held[place], f"in tier {place}, of codes {held} it retains {kept}")

    def _arguments(self, case: LedgerCase) -> tuple[Tensor, Tensor]:
        return case.held().to(self.device), case.place().to(self.device)

    def _retained(self, case: LedgerCase) -> list[list[bool]]:
        retained: list[list[bool]] = self.part.retain(*self._arguments(case), case.tiers).tolist()
        return retained
