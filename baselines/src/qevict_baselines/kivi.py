"""KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache (arXiv 2402.02750).

Keys on a grid per channel over groups of tokens, values on a grid per token over groups of channels; the last tokens
stay in full precision.
"""

import torch

from qevict.policy import Policy
from qevict.quantizers.affine import PerChannel, PerToken
from qevict_baselines.quantizing import quantizing


def kivi(*, bits: int = 2, group: int = 32, residual_tokens: int = 128, dtype: torch.dtype | None = None) -> Policy:
    """KIVI, every token kept.

    Faithful: both grids with their groups, codes of 2 or 4 bits, a residual in full precision, codes that are written
    once. Differs: keys and values leave the residual together, as soon as ``group`` tokens lie behind the last
    ``residual_tokens``, so that it holds from ``residual_tokens`` to ``residual_tokens + group - 1`` of both; the paper
    lets keys leave all at once whenever there are ``residual_tokens`` of them, and values one by one. So it does not
    matter in which pieces tokens come. Keys are quantised before RoPE (the authors' code quantises them behind it), and
    scales are rounded outwards.

    Args:
        bits: 2 (default) or 4; also 3 and 8. The authors advise 4 where query heads share KV heads.
        group: tokens of a group of keys, and channels of a group of values; the authors' 32. It must divide the
            channels of a head.
        residual_tokens: last tokens that stay in full precision; the authors' 128.
        dtype: dtype in which full precision is stored; None for the model's.

    Bytes per token and KV head of 64 channels: 48 for 2 bits, 80 for 4 (256 in full precision of 16 bits), which are
    ``bits + 1`` bits for a number.
    """
    return quantizing(
        f"int{bits}",
        PerChannel(bits),
        PerToken(bits, group_channels=group),
        window_tokens=group,
        recent_tokens=residual_tokens,
        dtype=dtype,
    )
