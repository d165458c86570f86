"""Who shares bytes, and how many windows these hold: parts of routers, as :mod:`~qevict.routers.filling`."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, SupportsFloat, TypeVar, get_args

import attrs
from torch import Tensor

from qevict.contracts.router import Scope
from qevict.contracts.values import Windows
from qevict.errors import PolicyError

_T = TypeVar("_T")

UNLIMITED = 2**31 - 1
"""Windows that fit where nothing limits them."""

Room = Sequence[tuple[int, ...]]
"""How many windows fit: for each group one number per tier, hot to cold."""


def as_shares(value: Iterable[float]) -> tuple[float, ...]:
    """Convert the shares that a router is given."""
    return tuple(value)


def valid_shares(_instance: object, _attribute: object, value: tuple[float, ...]) -> None:
    """Refuse shares that do not share everything.

    Raises:
        PolicyError: with what shares are.
    """
    numbers = all(isinstance(share, int | float) and share >= 0 for share in value)
    if not value or not numbers or not abs(sum(value) - 1) <= 1e-9:
        msg = f"shares say which part of the bytes each tier gets, hot to cold: none negative, sum 1; got {value!r}"
        raise PolicyError(msg)


def check_tiers(shares: tuple[float, ...], tiers: int) -> None:
    """One share per tier.

    Raises:
        PolicyError: with the remedy.
    """
    if tiers != len(shares):
        msg = f"{len(shares)} shares {shares} for {tiers} tiers; give one share per tier, hot to cold"
        raise PolicyError(msg)


def fits(capacity: int | None, tier_bytes: Sequence[int], shares: Sequence[float]) -> tuple[int, ...]:
    """How many windows each tier holds: ``floor(share * bytes / window bytes)``; all in the hottest without a limit."""
    if capacity is None:
        return (UNLIMITED,) + (0,) * (len(shares) - 1)
    return tuple(int(share * capacity / cost + 1e-9) for share, cost in zip(shares, tier_bytes, strict=True))


def valid_scope(_instance: object, _attribute: object, value: object) -> None:
    """Refuse another scope than there are.

    Raises:
        PolicyError: with those there are.
    """
    if value not in get_args(Scope):
        msg = f"scope says which lanes share their bytes: one of {', '.join(map(repr, get_args(Scope)))}; got {value!r}"
        raise PolicyError(msg)


def valid_part(_instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    """Refuse what is not a part of a whole.

    Raises:
        PolicyError: with the range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        msg = f"{attribute.name} is a part of a whole, in [0, 1]; got {value!r}"
        raise PolicyError(msg)


def exact(share: SupportsFloat) -> Fraction:
    """The fraction that a share such as 0.2 means; within int64 for any number of slots."""
    return Fraction(float(share)).limit_denominator(10**6)


def part_of(slots: Tensor, share: SupportsFloat) -> Tensor:
    """``floor(share * slots)``, in whole numbers: 0.2 of 10 slots are 2."""
    part = exact(share)
    return slots * part.numerator // part.denominator


@attrs.frozen(eq=False)
class Groups:
    """Lanes that share their bytes, side by side.

    What comes as ``[lanes, windows]`` is gathered to ``[groups, members, windows]``: each group's lanes in order, those
    of an earlier layer first.

    Attributes:
        windows: of the event.
        scope: who shares.
    """

    windows: Windows
    scope: Scope

    @property
    def _axes(self) -> tuple[int, int, int]:
        """Lanes are laid out as parts of groups: so many stretches, in each all groups, of each so many lanes."""
        lanes, layers, per_row = len(self.windows.candidates), self.windows.layers, self.windows.lanes_per_row
        match self.scope:
            case "lane":
                return 1, lanes, 1
            case "layer":
                return 1, lanes // per_row, per_row
            case "model":
                return layers, lanes // (layers * per_row), per_row

    def gather(self, values: Tensor) -> Tensor:
        """``[lanes, windows]`` to ``[groups, members, windows]``."""
        stretches, groups, lanes = self._axes
        apart = values.reshape(stretches, groups, lanes, values.shape[1])
        return apart.transpose(0, 1).reshape(groups, stretches * lanes, values.shape[1])

    def spread(self, values: Tensor) -> Tensor:
        """``[groups, members, windows]`` to ``[lanes, windows]``."""
        stretches, groups, lanes = self._axes
        apart = values.reshape(groups, stretches, lanes, values.shape[2])
        return apart.transpose(0, 1).reshape(stretches * groups * lanes, values.shape[2])

    def room(self, capacities: Sequence[int | None], tier_bytes: Sequence[int], shares: Sequence[float]) -> Room:
        """How many windows of each tier a group's lanes hold with all their bytes together.

        Without a limit for one lane there is none for its group.
        """
        return tuple(fits(_together(own), tier_bytes, shares) for own in self.members(capacities))

    def members(self, by_lane: Sequence[_T]) -> list[list[_T]]:
        """Host values by lane, as those of each group's lanes."""
        stretches, groups, lanes = self._axes
        starts = [[(stretch * groups + group) * lanes for stretch in range(stretches)] for group in range(groups)]
        return [[by_lane[first + lane] for first in firsts for lane in range(lanes)] for firsts in starts]


def _together(capacities: Sequence[int | None]) -> int | None:
    limited = [own for own in capacities if own is not None]
    return sum(limited) if len(limited) == len(capacities) else None
