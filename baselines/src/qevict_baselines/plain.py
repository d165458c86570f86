"""Plain integers: every token kept, as codes of 8, 4, 3 or 2 bits; the measure of what cleverer codes are worth."""

import torch

from qevict.policy import Policy
from qevict.quantizers.affine import PerChannel, PerToken
from qevict_baselines.quantizing import quantizing


def int8(*, dtype: torch.dtype | None = None) -> Policy:
    """Codes of 8 bits; see :func:`int2`.

    Bytes per token and KV head of 64 channels: 164 (256 in full precision of 16 bits).
    """
    return _plain(8, dtype)


def int4(*, dtype: torch.dtype | None = None) -> Policy:
    """Codes of 4 bits; see :func:`int2`.

    Bytes per token and KV head of 64 channels: 100 (256 in full precision of 16 bits).
    """
    return _plain(4, dtype)


def int3(*, dtype: torch.dtype | None = None) -> Policy:
    """Codes of 3 bits; see :func:`int2`.

    Bytes per token and KV head of 64 channels: 84 (256 in full precision of 16 bits).
    """
    return _plain(3, dtype)


def int2(*, dtype: torch.dtype | None = None) -> Policy:
    """Codes of 2 bits: QEvict's grids (arXiv 2608.05326) for every token behind the last 32, and nothing evicted.

    Keys have a grid per channel and window of 8 tokens, values one per token and head, with scales and zero points of
    16 bits. 5 sinks and 32 recent tokens stay in full precision.

    Bytes per token and KV head of 64 channels: 68 (256 in full precision of 16 bits).
    """
    return _plain(2, dtype)


def _plain(bits: int, dtype: torch.dtype | None) -> Policy:
    return quantizing(f"int{bits}", PerChannel(bits), PerToken(bits), sink_tokens=5, dtype=dtype)
