"""Levels between the ends of a grid."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qevict.errors import PolicyError
from qevict.quantizers.affine import PerChannel
from qevict.quantizers.levels import Levels, check, nearest, normal_shares, places_of, shares_of, snr_db

UNEVEN = (0.0, 0.1, 0.25, 1.0)

MAX_1960 = {
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}
"""The positive levels of least mean squared error for normal numbers: J. Max, "Quantizing for minimum distortion"."""


@pytest.mark.parametrize("bits", MAX_1960)
def test_normal_levels_are_those_of_max_stretched_to_the_ends(bits: int) -> None:
    upper = MAX_1960[bits]
    both = [*(-level for level in reversed(upper)), *upper]
    expected = [(level + upper[-1]) / (2 * upper[-1]) for level in both]
    assert normal_shares(bits) == pytest.approx(expected, abs=1e-4)
    assert (normal_shares(bits)[0], normal_shares(bits)[-1]) == (0, 1)


def test_uniform_levels() -> None:
    assert shares_of("uniform", 2) == pytest.approx((0, 1 / 3, 2 / 3, 1))
    assert shares_of(UNEVEN, 2) == UNEVEN


@given(st.sampled_from(["uniform", "normal", UNEVEN]), st.lists(st.floats(-2, 5), min_size=1, max_size=20))
@settings(deadline=None, max_examples=60)
def test_the_nearest_level_is_taken(levels: Levels, numbers: list[float]) -> None:
    """Places are counted in steps of the grid, from 0 to 3; what lies beyond is given the nearest end."""
    places = torch.tensor(numbers)
    table = 3 * torch.tensor(shares_of(levels, 2))
    codes = nearest(places, levels, 2)
    assert codes.dtype == torch.uint8
    found = places_of(codes, levels, 2)
    torch.testing.assert_close((found - places).abs(), (table - places[:, None]).abs().amin(1), rtol=0, atol=1e-5)
    assert int(codes.max()) <= 3


def test_each_code_is_a_level_of_its_own() -> None:
    for levels in ("uniform", "normal", UNEVEN):
        codes = torch.arange(4, dtype=torch.uint8)
        assert torch.equal(nearest(places_of(codes, levels, 2), levels, 2), codes)
        assert torch.equal(places_of(codes.float(), levels, 2), places_of(codes, levels, 2))


def test_columns_of_a_larger_tensor_are_fine() -> None:
    """No warning about memory that is not contiguous."""
    places = 3 * torch.rand(6, 4)
    assert torch.equal(nearest(places.T, "normal", 2), nearest(places, "normal", 2).T)


@pytest.mark.parametrize("levels", [(0.0, 1.0), (0.0, 0.5, 0.5, 1.0), (0.1, 0.2, 0.3, 1.0), (0.0, 0.2, 0.3, 0.9), ()])
def test_what_are_no_levels_is_refused(levels: Any) -> None:
    with pytest.raises(PolicyError, match=r"are not 4 ascending numbers from 0 to 1.*allowed: 'uniform', 'normal'"):
        PerChannel(2, levels=levels)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("levels", ["even", "", 3, None])
def test_what_is_unknown_is_refused(levels: Any) -> None:
    with pytest.raises(PolicyError, match="allowed: 'uniform', 'normal'"):
        check(levels, 2)


def test_normal_levels_of_8_bits_are_refused_with_the_remedy() -> None:
    with pytest.raises(PolicyError, match="use levels='uniform'"):
        PerChannel(8, levels="normal")


def test_what_is_promised() -> None:
    """6 dB a bit; levels for normal numbers promise them more, and levels that are wide where they lie, less."""
    uniform = [snr_db("uniform", bits) for bits in (2, 3, 4, 8)]
    assert uniform == pytest.approx([3.6, 10.9, 17.6, 42.2], abs=0.1)
    assert all(snr_db("normal", bits) > snr_db("uniform", bits) for bits in (2, 3, 4))
    assert snr_db(UNEVEN, 2) < 0
