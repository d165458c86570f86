"""Levels at unequal distances in ranges that leave outliers out: what KVQuant's quantizers are made of."""

from collections.abc import Iterable

import torch
from torch import Tensor

from qevict.contracts.quantizer import Quantizer
from qevict.contracts.values import ArraySpec, Codes, Layout
from qevict.errors import PolicyError
from qevict.quantizers.levels import normal_shares
from qevict.quantizers.packing import CODES_PER_GROUP, pack, packed_bytes, unpack
from qevict.quantizers.rounding import round_down, round_up
from qevict_baselines.sparse import farthest, outliers_of, put_back, sparse_layout, taken_out

NORMAL_DB = {2: 5.0, 3: 9.5, 4: 14.0}
"""What levels for normal numbers promise of windows of these, in dB."""


def window_layout(
    quantizer: Quantizer, outliers: float, window_tokens: int, head_dim: int, ranges: Iterable[str]
) -> Layout:
    """Codes, a range for each token under the names given, and outliers.

    Raises:
        PolicyError: windows of that shape cannot be encoded.
    """
    numbers = window_tokens * head_dim
    if numbers % CODES_PER_GROUP[quantizer.bits]:
        msg = (
            f"{numbers} codes of {quantizer.bits} bits (window {window_tokens} x head_dim {head_dim}) do not fill "
            f"bytes; window x head_dim must be a multiple of {CODES_PER_GROUP[quantizer.bits]}: change window_tokens"
        )
        raise PolicyError(msg)
    count = outliers_of(outliers, window_tokens, head_dim)
    packed = {"codes": ArraySpec((packed_bytes(numbers, quantizer.bits),), torch.uint8)}
    own = {name: ArraySpec((window_tokens,), torch.float16) for name in ranges}
    return packed | own | dict(sparse_layout(count, window_tokens, head_dim))


def normal_levels(bits: int) -> Tensor:
    """Levels for normal numbers, from -1 to 1."""
    return torch.tensor(normal_shares(bits)) * 2 - 1


def as_range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Ends of a range in 16 bits, which cover what they covered."""
    return round_down(low, torch.float16), round_up(high, torch.float16)


def beyond(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """How far numbers lie out of a range, in units of half of it: negative inside, -1 in the middle."""
    half = (high - low) / 2
    return ((x - (high + low) / 2).abs() - half) / torch.where(half > 0, half, 1)


def encoded(x: Tensor, low: Tensor, high: Tensor, levels: Tensor, bits: int, places: Tensor) -> Codes:
    """Codes of the nearest levels, and the numbers at some places.

    Args:
        x: ``[heads, windows, window, head_dim]``.
        low: lower end of the range of each number, broadcasting.
        high: upper end.
        levels: ``[heads, windows, 2^bits]`` in [-1, 1].
        bits: of a code.
        places: of the outliers.
    """
    half = (high - low) / 2
    stretched = (x - (high + low) / 2) / torch.where(half > 0, half, 1)
    middles = (levels[..., 1:] + levels[..., :-1]).float() / 2
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for middle in middles.unbind(-1):
        codes += stretched > middle[..., None, None]
    return {"codes": pack(codes.flatten(-2), bits), **taken_out(x, places)}


def decoded(codes: Codes, low: Tensor, high: Tensor, levels: Tensor, bits: int, head_dim: int) -> Tensor:
    """The inverse of :func:`encoded`."""
    grid = unpack(codes["codes"], bits).long()
    numbers = levels.float().gather(-1, grid).unflatten(-1, (-1, head_dim))
    return put_back(torch.addcmul((high + low) / 2, numbers, (high - low) / 2), codes)


def outlying(x: Tensor, low: Tensor, high: Tensor, part: float) -> Tensor:
    """Places of a window's outliers: the numbers that lie farthest out of their ranges."""
    return farthest(beyond(x, low, high), outliers_of(part, x.shape[-2], x.shape[-1]))


def token_ranges(x: Tensor, part: float) -> tuple[Tensor, Tensor, Tensor]:
    """Places of a window's outliers, and the range that each token has without them, ``[..., window]``.

    Far out is what lies far from the token's median, in units of its mean distance from that.
    """
    count = outliers_of(part, x.shape[-2], x.shape[-1])
    away = (x - x.median(-1, keepdim=True).values).abs()
    places = farthest(away / away.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny), count)
    out = torch.zeros_like(x, dtype=torch.bool).flatten(-2).scatter(-1, places, value=True).view_as(x)
    middle = x.median(-1).values  # what a token has left if all of it is taken out
    low = torch.minimum(x.masked_fill(out, torch.inf).amin(-1), middle)
    high = torch.maximum(x.masked_fill(out, -torch.inf).amax(-1), middle)
    return places, *as_range(low, high)
