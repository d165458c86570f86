"""OScaR (arXiv 2605.19660): channels rotated, tokens divided by their length, then KIVI's grids.

Rotation spreads channels that are far off over all others; a token much shorter than its neighbours, such as a sink,
would otherwise vanish in the grid of their numbers.
"""

import torch

from qevict.policy import Policy
from qevict.quantizers.affine import PerChannel, PerToken
from qevict_baselines.quantizing import quantizing


def oscar(*, bits: int = 2, group: int = 32, residual_tokens: int = 128, dtype: torch.dtype | None = None) -> Policy:
    """Rotation and token scaling under KIVI's groups, every token kept.

    Faithful: Hadamard rotation of keys and values, keys divided by one number for each token, grids per channel over
    groups of tokens for keys, per token over groups of channels for values, a residual in full precision. Differs: keys
    are rotated before RoPE and not behind it, and a token's length is that of its KV head and not of all heads; the
    rotation of the values is computed and not folded into the weights; tokens leave the residual as in
    :func:`~qevict_baselines.kivi.kivi`.

    Args:
        bits: 2 (default), 3, 4 or 8.
        group: tokens of a group of keys, and channels of a group of values; KIVI's 32.
        residual_tokens: last tokens that stay in full precision; KIVI's 128.
        dtype: dtype in which full precision is stored; None for the model's.

    Bytes per token and KV head of 64 channels: 50 for 2 bits (256 in full precision of 16 bits), 2 more than KIVI's.
    """
    return quantizing(
        f"int{bits}",
        PerChannel(bits, rotated=True, normed=True),
        PerToken(bits, group_channels=group, rotated=True),
        window_tokens=group,
        recent_tokens=residual_tokens,
        dtype=dtype,
    )
