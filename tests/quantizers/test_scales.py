"""How scales and zero points are stored."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qevict.contracts.values import layout_bytes
from qevict.errors import PolicyError
from qevict.quantizers.scales import PerSequence, Plain, SecondLevel

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
scale_bits = pytest.mark.parametrize("bits", [4, 8])


def outwards(zero: Tensor, scale: Tensor) -> Tensor:
    """A loss to which all grids are the same: the first one is taken, which covers its group."""
    return torch.zeros_like(zero)


def ends(offset: float, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """Ends of 2 x 3 windows of 10 groups; offsets differ from group to group."""
    generator = torch.Generator().manual_seed(seed)
    low = offset * torch.rand(2, 3, 10, generator=generator) + spread * torch.randn(2, 3, 10, generator=generator)
    return low, low + spread * torch.rand(2, 3, 10, generator=generator)


@given(
    st.sampled_from([4, 8]),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 60.0, -45.0, 1e4, 3e-5]),
    st.sampled_from([0.0, 1e-7, 1e-4, 1e-2, 1.0, 30.0, 5e3]),
    st.sampled_from([3, 7, 15, 255]),
    st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=150)
def test_the_first_grid_covers_its_group_and_is_no_wider_than_one_step_each_makes_it(
    bits: int, dtype: torch.dtype, offset: float, spread: float, steps: int, seed: int
) -> None:
    """The zero point falls by less than a step of its own grid, the scale rises by less than one of its."""
    scales, (low, high) = SecondLevel(bits, dtype), ends(offset, spread, seed)
    codes = scales.cover(low, high, steps, outwards)
    zero, scale = (each.double() for each in scales.read(codes))
    fuzz = 2.0**-21 * (low.abs().amax(-1, keepdim=True) + high.abs().amax(-1, keepdim=True)).double()
    assert (zero <= low.double() + fuzz).all()
    assert (zero + steps * scale >= high.double() - fuzz).all()
    zero_step, scale_step = (codes[f"{name}_range"].double()[..., 1:] for name in ("zero", "scale"))
    assert (zero >= low.double() - zero_step - fuzz).all()
    assert (scale <= (high.double() - zero) / steps + scale_step + fuzz).all()
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    over_windows = low.amax(-1, keepdim=True) - low.amin(-1, keepdim=True) + eps * low.abs().amax(-1, keepdim=True)
    assert (zero_step <= (over_windows.double() / (2**bits - 1) + fuzz) * (1 + 2 * eps) + tiny).all()


@pytest.mark.parametrize(("zero_up", "scale_down"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_each_group_takes_the_neighbours_that_lose_least(zero_up: int, scale_down: int) -> None:
    """Zero points lie on 0 ... 15, scales on whole numbers as well; group 3 reaches from 4.25 to 11.75."""
    low = torch.tensor([[[0.0, 15.0, 2.0, 4.25]]])
    high = low + 3 * torch.tensor([[[0.0, 15.0, 1.0, 2.5]]])
    wanted = torch.tensor([4.0 + zero_up, 3.0 - scale_down])

    def loss(zero: Tensor, scale: Tensor) -> Tensor:
        return (zero - wanted[0]).square() + (scale - wanted[1]).square()

    scales = SecondLevel(4, torch.float32)
    zero, scale = scales.read(scales.cover(low, high, 3, loss))
    assert [float(zero[0, 0, 3]), float(scale[0, 0, 3])] == wanted.tolist()


@scale_bits
def test_groups_that_are_alike_are_as_exact_as_one(bits: int) -> None:
    """All zero points equal, and all scales: what the dtype holds comes back."""
    scales = SecondLevel(bits, torch.float16)
    low = torch.full((1, 2, 6), -2.25)
    zero, scale = scales.read(scales.cover(low, low + 3 * 0.5, 3, outwards))
    assert (zero == -2.25).all()
    assert (scale == 0.5).all()
    zero, scale = scales.read(scales.cover(low, low, 3, outwards))
    assert (zero == -2.25).all()
    assert (scale == 0).all()


@scale_bits
def test_numbers_beyond_the_dtype_stay_finite(bits: int) -> None:
    low = torch.tensor([[[-2e5, 0.0, 1e5, -1e-30]]])
    scales = SecondLevel(bits, torch.float16)
    zero, scale = scales.read(scales.cover(low, low + 3e5, 3, outwards))
    assert zero.isfinite().all()
    assert scale.isfinite().all()


@scale_bits
def test_the_layout_is_what_is_stored(bits: int) -> None:
    scales = SecondLevel(bits, torch.bfloat16)
    codes, layout = scales.cover(*ends(0, 1, 0), 3, outwards), scales.layout(10)
    assert {name: (array.shape[2:], array.dtype) for name, array in codes.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in layout.items()
    }
    assert layout_bytes(layout) == 2 * 10 * bits // 8 + 2 * 2 * 2


def test_scales_that_fill_no_bytes_are_refused_with_the_remedy() -> None:
    with pytest.raises(
        PolicyError, match=r"5 scales of 4 bits.*multiple of 2: change window_tokens, or use scale_bits=8"
    ):
        SecondLevel(4, torch.float16).layout(5)
    assert layout_bytes(SecondLevel(8, torch.float16).layout(5)) == 2 * 5 + 8


@pytest.mark.parametrize("own", [Plain(torch.float16), SecondLevel(4, torch.float16)], ids=repr)
def test_a_sequence_stores_once_what_a_window_would(own: Plain | SecondLevel) -> None:
    low, high = ends(0, 1, 0)
    scales = PerSequence(own)
    assert scales.layout(10) == scales.cover(low, high, 3, outwards) == {}
    assert scales.shared_layout(10) == own.layout(10)
    fitted, alone = (each(low[:, 0], high[:, 0], 3, outwards) for each in (scales.fit, own.cover))
    assert all(torch.equal(fitted[name], alone[name]) for name in own.layout(10))
    assert torch.equal(scales.read(fitted)[1], own.read(alone)[1])
    assert not scales.by_window
    assert own.by_window
    assert own.shared_layout(10) == own.fit(low, high, 3, outwards) == {}
