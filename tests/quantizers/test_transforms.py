"""What is done to windows before a grid is laid over them, and undone behind it."""

import pytest
import torch
from torch import Tensor

from qevict.contracts.quantizer import for_windows
from qevict.contracts.values import ArraySpec
from qevict.quantizers.transforms import Centred, ChannelScaled, Normed, Rotated, Transform

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EACH = [kind(dtype) for kind in (Centred, ChannelScaled, Normed) for dtype in DTYPES]
TRANSFORMS: list[Transform] = [*EACH, Rotated()]

each = pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def there(transform: Transform, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The other windows, and everything that takes them back."""
    shared = for_windows(transform.fit(x), x.shape[1])
    y, own = transform.forward(x, shared)
    return y, {**shared, **own}


def sylvester(size: int) -> Tensor:
    """The Hadamard matrix by its recursion."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


@each
def test_there_and_back(transform: Transform) -> None:
    x = 7 + normal(2, 3, 4, 24)
    y, codes = there(transform, x)
    assert (y - x).abs().max() > 0.5
    torch.testing.assert_close(transform.inverse(y, codes), x, rtol=1e-5, atol=1e-5)


@each
def test_arrays_are_those_of_the_layouts(transform: Transform) -> None:
    x = normal(2, 3, 4, 24)
    shared, (_, own) = transform.fit(x), transform.forward(x, for_windows(transform.fit(x), 3))
    found = {name: ArraySpec(tuple(array.shape[1:]), array.dtype) for name, array in shared.items()}
    assert found == transform.shared_layout(24)
    assert {name: ArraySpec(tuple(array.shape[2:]), array.dtype) for name, array in own.items()} == transform.layout(4)


@each
def test_neither_the_order_of_windows_nor_their_company_changes_a_bit(transform: Transform) -> None:
    x = 60 + normal(3, 7, 8, 24)
    turned = x[:, torch.randperm(7, generator=torch.Generator().manual_seed(1))]
    for name, array in transform.fit(x).items():
        assert torch.equal(array, transform.fit(turned)[name])
        assert torch.equal(array[1:2], transform.fit(x[1:2])[name])
    together, codes = there(transform, x)
    one = {name: array[2:, 3:4] for name, array in codes.items()}
    alone, _ = transform.forward(x[2:, 3:4], one)
    assert torch.equal(alone, together[2:, 3:4])
    assert torch.equal(transform.inverse(alone, one), transform.inverse(together, codes)[2:, 3:4])


# ── Each by itself ────────────────────────────────────────────────────────────────────────────────


@dtypes
def test_the_mean_is_taken_off(dtype: torch.dtype) -> None:
    x = normal(1, 5, 8, 4) + torch.tensor([60.0, -45.0, 0.0, 1e-3])
    y, codes = there(Centred(dtype), x)
    expected = x.double().mean((1, 2))
    assert torch.equal(codes["mean"][:, 0], expected.to(dtype))
    assert y.mean((1, 2)).abs().max() <= 2 * torch.finfo(dtype).eps * 60


def test_a_mean_beyond_the_dtype_is_finite() -> None:
    assert Centred(torch.float16).fit(torch.full((1, 1, 2, 2), -1e5))["mean"].tolist() == [[-65504, -65504]]


@dtypes
def test_channels_are_scaled_as_zipcache_has_it(dtype: torch.dtype) -> None:
    """ZipCache (arXiv 2405.14256), a value by hand: the largest numbers 16, 1, 0.25 and 4 give 4, 1, 0.5 and 2."""
    x = torch.tensor([[16.0, 1.0, -0.25, 4.0], [-4.0, 0.25, 0.25, 1.0], [8.0, -0.5, 0.0, -2.0]]).view(1, 1, 3, 4)
    y, codes = there(ChannelScaled(dtype), x)
    assert codes["channel_scale"][0, 0].tolist() == [4, 1, 0.5, 2]
    assert y[0, 0, 0].tolist() == [4, 1, -0.5, 2]


def test_a_channel_of_zeros_stays_one() -> None:
    """Later numbers that are none are its nearest end: 0."""
    x = normal(1, 2, 3, 4)
    x[..., 2] = 0
    y, codes = there(ChannelScaled(torch.float16), x)
    assert y.isfinite().all()
    assert (ChannelScaled(torch.float16).inverse(y + 1, codes)[..., 2] == 0).all()
    later, _ = ChannelScaled(torch.float16).forward(torch.ones_like(x), codes)
    assert (later[..., 2] == 0).all()


@dtypes
def test_tokens_are_divided_by_their_lengths(dtype: torch.dtype) -> None:
    x = normal(1, 2, 4, 16) * torch.tensor([1e-30, 0.0, 1.0, 1e3]).view(1, 1, 4, 1)
    y, codes = there(Normed(dtype), x)
    lengths = x.double().norm(dim=-1)
    assert (codes["norm"].double() >= lengths * (1 - 1e-6)).all()
    assert (codes["norm"].double()[..., 2:] <= lengths[..., 2:] * (1 + torch.finfo(dtype).eps)).all()
    assert (y.norm(dim=-1)[..., 2:] > 0.99).all()
    assert (y[..., 1, :] == 0).all()
    assert (Normed(dtype).inverse(y + 1, codes)[..., 1, :] == 0).all()


def test_a_length_beyond_the_dtype_is_finite() -> None:
    x = torch.full((1, 1, 1, 4), 5e4)
    y, codes = there(Normed(torch.float16), x)
    assert codes["norm"].tolist() == [[[65504]]]
    torch.testing.assert_close(Normed(torch.float16).inverse(y, codes), x)


@pytest.mark.parametrize(("head_dim", "block"), [(2, 2), (6, 2), (64, 64), (80, 16), (96, 32), (128, 128)])
def test_blocks_are_turned_by_a_hadamard_matrix(head_dim: int, block: int) -> None:
    """Orthonormal for powers of four, and up to a factor of sqrt(2) else."""
    x = normal(1, 2, 3, head_dim)
    y, _ = there(Rotated(), x)
    turned = x.unflatten(-1, (-1, block)) @ sylvester(block)
    size = float((y.norm() / x.norm()).square())
    torch.testing.assert_close(y, (turned * (size / block) ** 0.5).flatten(-2))
    assert size == pytest.approx(1.0 if block in {64, 16} else 0.5)


def test_a_rotation_spreads_what_is_far_off_and_keeps_sums_exact() -> None:
    x = torch.zeros(1, 1, 1, 64)
    x[..., 3] = 64
    assert (there(Rotated(), x)[0].abs() == 8).all()
    constant = torch.full((1, 1, 2, 128), 31.75)
    y, _ = there(Rotated(), constant)
    assert torch.equal(Rotated().inverse(y.half().float(), {}), constant)
