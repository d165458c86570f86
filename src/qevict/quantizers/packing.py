"""Codes of 2, 3, 4 or 8 bits, packed into bytes without a gap."""

import torch
from jaxtyping import UInt8
from torch import Tensor

CODES_PER_GROUP = {2: 4, 3: 8, 4: 2, 8: 1}
"""Codes that fill a whole number of bytes, by bits."""


def packed_bytes(codes: int, bits: int) -> int:
    """Bytes of ``codes`` codes; the caller makes sure that they fill whole bytes."""
    return codes * bits // 8


def pack(codes: UInt8[Tensor, "*lead codes"], bits: int) -> UInt8[Tensor, "*lead packed"]:
    """Pack along the last axis, the first code in the lowest bits."""
    if bits == 8:
        return codes
    per = CODES_PER_GROUP[bits]
    groups = codes.unflatten(-1, (-1, per)).to(torch.int32)
    shifts = torch.arange(per, dtype=torch.int32, device=codes.device) * bits
    words = (groups << shifts).sum(-1, dtype=torch.int32)
    return _split(words, per * bits // 8)


def unpack(packed: UInt8[Tensor, "*lead packed"], bits: int) -> UInt8[Tensor, "*lead codes"]:
    """The inverse of :func:`pack`."""
    if bits == 8:
        return packed
    per = CODES_PER_GROUP[bits]
    words = _join(packed, per * bits // 8)
    shifts = torch.arange(per, dtype=words.dtype, device=packed.device) * bits
    codes: Tensor = ((words[..., None] >> shifts) & (2**bits - 1)).to(torch.uint8)
    return codes.flatten(-2)


def _split(words: Tensor, size: int) -> Tensor:
    if size == 1:
        return words.to(torch.uint8)
    shifts = torch.arange(size, dtype=torch.int32, device=words.device) * 8
    parts: Tensor = ((words[..., None] >> shifts) & 255).to(torch.uint8)
    return parts.flatten(-2)


def _join(packed: Tensor, size: int) -> Tensor:
    if size == 1:
        return packed
    parts = packed.unflatten(-1, (-1, size)).to(torch.int32)
    shifts = torch.arange(size, dtype=torch.int32, device=packed.device) * 8
    words: Tensor = (parts << shifts).sum(-1, dtype=torch.int32)
    return words
