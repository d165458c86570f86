"""Windows of numbers on which quantizers are tried."""

import attrs
import torch
from torch import Tensor

from qevict.testing.values import uniform

SHAPES = ((1, 64), (2, 32), (4, 16), (8, 8), (8, 64), (5, 96), (3, 5), (16, 40), (32, 128))
"""Window tokens and channels of the cases; a quantizer is tried on those that its ``layout`` accepts."""


@attrs.frozen
class QuantizerCase:
    """Windows of numbers, each channel and token with the full range of its window.

    Every window and head has a magnitude of its own, half of the one before: none can do with the scale of another.

    Attributes:
        window_tokens: tokens of a window.
        head_dim: channels.
        heads: heads that are encoded together.
        windows: windows that are encoded together.
        offset: the smallest number of the first window; large beside the spread, as where keys have a bias.
        spread: the largest number of the first window less the smallest.
        dtype: dtype of the model.
        seed: decides the numbers.
    """

    window_tokens: int
    head_dim: int
    heads: int
    windows: int
    offset: float
    spread: float
    dtype: torch.dtype
    seed: int

    def numbers(self) -> Tensor:
        """``[heads, windows, window, head_dim]``."""
        shares = uniform(self.seed, self.heads, self.windows, self.window_tokens, self.head_dim)
        diagonal = torch.arange(max(self.window_tokens, self.head_dim))
        token, channel = diagonal % self.window_tokens, diagonal % self.head_dim
        shares[..., (token + 1) % self.window_tokens, channel] = 0.0
        shares[..., token, channel] = 1.0
        shares[..., 0, 0] = 0.0 if self.window_tokens == 1 else 1.0
        magnitudes = 0.5 ** torch.arange(self.heads * self.windows).view(self.heads, self.windows, 1, 1)
        return (magnitudes * (self.offset + self.spread * shares)).to(self.dtype)
