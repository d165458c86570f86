"""Where the levels of a grid lie between its ends."""

import functools
import itertools
import math
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from qevict.errors import PolicyError

Levels = Literal["uniform", "normal"] | tuple[float, ...]
"""At equal distances, as the normal distribution wants them, or each by its share of the range, from 0 to 1."""

_ROUNDS = 1000
"""Of Lloyd's iteration: after 500 of them 16 levels move by less than 1e-9."""


def shares_of(levels: Levels, bits: int) -> tuple[float, ...]:
    """Where each of ``2^bits`` levels lies between the ends of the grid, from 0 to 1."""
    if levels == "uniform":
        return tuple(level / (2**bits - 1) for level in range(2**bits))
    return normal_shares(bits) if levels == "normal" else tuple(levels)


def check(levels: Levels, bits: int) -> None:
    """Refuse levels that are no grid of so many bits."""
    if levels == "uniform" or (levels == "normal" and bits < 8):
        return
    if levels == "normal":
        raise PolicyError(
            "levels='normal' is for 2, 3 and 4 bits, got bits=8, where levels at equal distances lose next to nothing; "
            "use levels='uniform'"
        )
    if not isinstance(levels, tuple) or len(levels) != 2**bits or not _spans(levels):
        raise PolicyError(
            f"levels={levels!r} are not {2**bits} ascending numbers from 0 to 1, as bits={bits} takes them; allowed: "
            "'uniform', 'normal', or such a tuple, whose first number is 0 and whose last is 1"
        )


def _spans(shares: tuple[float, ...]) -> bool:
    """They rise from 0 to 1."""
    return (shares[0], shares[-1]) == (0, 1) and all(low < high for low, high in itertools.pairwise(shares))


@functools.cache
def normal_shares(bits: int) -> tuple[float, ...]:
    """The levels of least mean squared error for normal numbers, moved and stretched to end at 0 and 1.

    Lloyd's iteration (Lloyd, "Least squares quantization in PCM", 1982; Max, "Quantizing for minimum distortion", 1960)
    from levels at equal shares of the distribution. A grid ends at the extremes of a group, so that only the ratios of
    the levels are of use. Rounded to six digits, which no two machines compute differently.
    """
    bell = NormalDist()
    levels = [bell.inv_cdf((level + 0.5) / 2**bits) for level in range(2**bits)]
    for _ in range(_ROUNDS):
        middles = [(low + high) / 2 for low, high in itertools.pairwise(levels)]
        edges = [-math.inf, *middles, math.inf]
        levels = [
            (bell.pdf(low) - bell.pdf(high)) / (bell.cdf(high) - bell.cdf(low))
            for low, high in itertools.pairwise(edges)
        ]
    return tuple(round((level - levels[0]) / (levels[-1] - levels[0]), 6) for level in levels)


def snr_db(levels: Levels, bits: int) -> float:
    """What normal numbers are promised, in dB, on grids over groups of up to 1024 of them.

    Such a group ends at +-3.25 on average. Between two levels the error is taken to be that of numbers that lie there
    at random; half a dB is left for what this misses and for the rounding of the grid.
    """
    bell, ends = NormalDist(), 3.25
    places = [ends * (2 * share - 1) for share in shares_of(levels, bits)]
    gaps = itertools.pairwise(places)
    noise = sum((bell.cdf(high) - bell.cdf(low)) * (high - low) ** 2 / 12 for low, high in gaps)
    return -10 * math.log10(noise) - 0.5


def steps_of(levels: Levels, bits: int) -> tuple[float, ...]:
    """Where each of ``2^bits`` levels lies, in steps from the grid's lower end."""
    return tuple(share * (2**bits - 1) for share in shares_of(levels, bits))


@functools.cache
def _table(steps: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Levels in steps of the grid, and the middles between them."""
    levels = torch.tensor(steps, dtype=torch.float32, device=device)
    return levels, (levels[1:] + levels[:-1]) / 2


def nearest(places: Tensor, levels: Levels, bits: int) -> Tensor:
    """Codes of the nearest levels; places are counted in steps from the grid's lower end."""
    if levels == "uniform":
        return places.round().clamp_(0, 2**bits - 1).to(torch.uint8)
    _, middles = _table(steps_of(levels, bits), places.device)
    return torch.bucketize(places.contiguous(), middles, out_int32=True).to(torch.uint8)


def places_of(codes: Tensor, levels: Levels, bits: int) -> Tensor:
    """The inverse: where levels lie, in steps from the grid's lower end. Codes are whole numbers of any dtype."""
    if levels == "uniform":
        return codes.float()
    table, _ = _table(steps_of(levels, bits), codes.device)
    return table[codes.long()]
