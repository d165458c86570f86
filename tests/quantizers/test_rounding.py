"""Directed rounding, against a sorted table of every finite number of the dtype."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qevict.quantizers.rounding import round_down, round_up

NARROW = (torch.float16, torch.bfloat16)


def every_finite_number(dtype: torch.dtype) -> Tensor:
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).double()
    finite: Tensor = patterns[patterns.isfinite()].unique()
    return finite


NUMBERS = {dtype: every_finite_number(dtype) for dtype in NARROW}


def floor_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest finite number at most ``x``, or the smallest finite one where there is none."""
    table = NUMBERS[dtype]
    return table[(torch.searchsorted(table, x.double(), right=True) - 1).clamp(min=0)]


def ceiling_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    table = NUMBERS[dtype]
    return table[torch.searchsorted(table, x.double()).clamp(max=len(table) - 1)]


def edges(dtype: torch.dtype) -> Tensor:
    """Around every number of the dtype: itself, its neighbours in fp32, and the middle to the next one."""
    near = NUMBERS[dtype].float()
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    middle = ((near[1:].double() + near[:-1].double()) / 2).float()
    return torch.cat((near, near.nextafter(up), near.nextafter(down), middle))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_rounding_is_to_the_next_number_on_the_asked_side(dtype: torch.dtype) -> None:
    """All numbers of the dtype, subnormals and +-65504 included, all middles, and what lies beside them."""
    x = edges(dtype)
    x = x[x.isfinite() & (x.abs() <= torch.finfo(dtype).max)]
    down, up = round_down(x, dtype), round_up(x, dtype)
    assert down.dtype == up.dtype == dtype
    assert torch.equal(down.double(), floor_of(x, dtype))
    assert torch.equal(up.double(), ceiling_of(x, dtype))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
@settings(deadline=None, max_examples=100)
def test_any_float_lies_between_its_roundings(dtype: torch.dtype, values: list[float]) -> None:
    limit = torch.finfo(dtype).max
    x = torch.tensor(values).clamp(-limit, limit)
    down, up = round_down(x, dtype), round_up(x, dtype)
    assert bool((down.double() <= x.double()).all())
    assert bool((up.double() >= x.double()).all())
    assert torch.equal(down.double(), floor_of(x, dtype))
    assert torch.equal(up.double(), ceiling_of(x, dtype))


BEYOND = {
    torch.float16: [65504.01, 65519.9, 65520.0, 65536.0, 70000.0, 1e6, 3e38, math.inf],
    torch.bfloat16: [3.3895314e38, 3.39e38, 3.4e38, math.inf],
}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_beyond_the_range_the_last_finite_number_is_taken(dtype: torch.dtype) -> None:
    """On both sides and in both directions: a stored parameter is never infinite."""
    limit = torch.finfo(dtype).max
    above = torch.tensor(BEYOND[dtype])
    above = above[above.double() >= limit]
    assert len(above) >= 3
    assert round_down(above, dtype).double().unique().tolist() == [limit]
    assert round_up(above, dtype).double().unique().tolist() == [limit]
    assert round_up(-above, dtype).double().unique().tolist() == [-limit]
    assert round_down(-above, dtype).double().unique().tolist() == [-limit]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_fp32_stays_as_it_is(values: list[float]) -> None:
    x = torch.tensor(values)
    assert torch.equal(round_down(x, torch.float32), x)
    assert torch.equal(round_up(x, torch.float32), x)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_numbers_too_small_for_the_dtype_still_round_outwards(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    x = torch.tensor([1e-45, 1e-41, -1e-45, -1e-41, 0.0, -0.0])
    assert round_up(x, dtype).double().tolist() == [tiny, tiny, 0, 0, 0, 0]
    assert round_down(x, dtype).double().tolist() == [0, 0, -tiny, -tiny, 0, 0]


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
def test_the_argument_is_left_alone_and_may_be_strided(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.1, -70.3], [3e-6, 1e4]]).T
    before = x.clone()
    assert torch.equal(round_down(x, dtype), round_down(before.contiguous(), dtype))
    assert torch.equal(round_up(x, dtype), round_up(before.contiguous(), dtype))
    assert torch.equal(x, before)
