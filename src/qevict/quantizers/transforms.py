"""What is done to windows before a grid is laid over them, and undone behind it."""

import math
from abc import ABC, abstractmethod

import attrs
import torch
from torch import Tensor

from qevict.contracts.paired import Undone
from qevict.contracts.quantizer import NOTHING_SHARED
from qevict.contracts.values import ArraySpec, Codes, Layout
from qevict.quantizers.rounding import round_up


class Transform(ABC):
    """Turns windows ``[heads, windows, window, head_dim]`` in fp32 into others, and back.

    Sums are taken in fp64, so that they depend neither on the order of the windows nor on what else is summed beside
    them, once they are rounded to what is stored.
    """

    @property
    @abstractmethod
    def undone(self) -> Undone:
        """What :meth:`inverse` is called in the layout of codes."""

    def shared_layout(self, head_dim: int) -> Layout:
        """The arrays that all windows of a KV head have in common."""
        return {}

    def layout(self, window_tokens: int) -> Layout:
        """The arrays that each window stores."""
        return {}

    def fit(self, x: Tensor) -> Codes:
        """The shared arrays, with a leading axis ``heads``."""
        return NOTHING_SHARED

    @abstractmethod
    def forward(self, x: Tensor, shared: Codes) -> tuple[Tensor, Codes]:
        """The other windows, and the arrays that each stores."""

    @abstractmethod
    def inverse(self, y: Tensor, codes: Codes) -> Tensor:
        """The windows themselves, from the others and both kinds of arrays."""


@attrs.frozen
class Centred(Transform):
    """The mean of each channel over the sequence is taken off.

    Attributes:
        dtype: of the means.
    """

    dtype: torch.dtype

    @property
    def undone(self) -> Undone:
        return "mean"

    def shared_layout(self, head_dim: int) -> Layout:
        return {"mean": ArraySpec((head_dim,), self.dtype)}

    def fit(self, x: Tensor) -> Codes:
        most = torch.finfo(self.dtype).max
        mean = x.sum((1, 2), dtype=torch.float64) / (x.shape[1] * x.shape[2])
        return {"mean": mean.clamp(-most, most).to(self.dtype)}

    def forward(self, x: Tensor, shared: Codes) -> tuple[Tensor, Codes]:
        return x - shared["mean"].float().unsqueeze(-2), {}

    def inverse(self, y: Tensor, codes: Codes) -> Tensor:
        return y + codes["mean"].float().unsqueeze(-2)


@attrs.frozen
class ChannelScaled(Transform):
    """Each channel is divided by ``c = sqrt(max |x|)`` over the sequence; one that is 0 throughout stays 0.

    Attributes:
        dtype: of the divisors.
    """

    dtype: torch.dtype

    @property
    def undone(self) -> Undone:
        return "channel_scale"

    def shared_layout(self, head_dim: int) -> Layout:
        return {"channel_scale": ArraySpec((head_dim,), self.dtype)}

    def fit(self, x: Tensor) -> Codes:
        return {"channel_scale": round_up(x.abs().amax((1, 2)).sqrt(), self.dtype)}

    def forward(self, x: Tensor, shared: Codes) -> tuple[Tensor, Codes]:
        divisor = shared["channel_scale"].float().unsqueeze(-2)
        return torch.where(divisor > 0, x / divisor, 0), {}

    def inverse(self, y: Tensor, codes: Codes) -> Tensor:
        return y * codes["channel_scale"].float().unsqueeze(-2)


@attrs.frozen
class Rotated(Transform):
    """Channels are mixed by a Hadamard matrix, in blocks of the largest power of two that divides their number.

    Both directions are scaled by powers of two, so that what sums are exact stays exact: the matrix is orthonormal
    where the block is a power of four, and orthonormal up to a factor of sqrt(2) else.
    """

    @property
    def undone(self) -> Undone:
        return "hadamard"

    def forward(self, x: Tensor, shared: Codes) -> tuple[Tensor, Codes]:
        return _hadamard(x) * 2.0 ** -math.ceil(_exponent(x) / 2), {}

    def inverse(self, y: Tensor, codes: Codes) -> Tensor:
        return _hadamard(y) * 2.0 ** -math.floor(_exponent(y) / 2)


@attrs.frozen
class Normed(Transform):
    """Each token is divided by its length; a token of zeros stays one, and comes back exactly.

    Attributes:
        dtype: of the lengths, which are rounded up.
    """

    dtype: torch.dtype

    @property
    def undone(self) -> Undone:
        return "norm"

    def layout(self, window_tokens: int) -> Layout:
        return {"norm": ArraySpec((window_tokens,), self.dtype)}

    def forward(self, x: Tensor, shared: Codes) -> tuple[Tensor, Codes]:
        lengths = x.double().square().sum(-1).sqrt()
        norm = round_up(lengths.float(), self.dtype)
        divisor = torch.where(norm > 0, norm, 1).float()
        return x / divisor.unsqueeze(-1), {"norm": norm}

    def inverse(self, y: Tensor, codes: Codes) -> Tensor:
        return y * codes["norm"].float().unsqueeze(-1)


def _exponent(x: Tensor) -> int:
    """The binary logarithm of the block."""
    return (x.shape[-1] & -x.shape[-1]).bit_length() - 1


def _hadamard(x: Tensor) -> Tensor:
    """Sums and differences of each block, one binary digit of the channel after another (fast Walsh-Hadamard)."""
    for digit in range(_exponent(x)):
        low, high = x.unflatten(-1, (-1, 2, 2**digit)).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
    return x
