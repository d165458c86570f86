"""Codes of the paired layout, read bit by bit as its description says."""

import torch
from torch import Tensor

from qevict.contracts.paired import PairedCodes, Undone
from qevict.contracts.values import Codes


def plainly_read(layout: PairedCodes, codes: Codes, window_tokens: int, head_dim: int) -> Tensor:
    """``[heads, windows, window, head_dim]`` in fp64."""
    by_pair = _numbers(codes["codes"], layout.bits).unflatten(-1, (head_dim // 2, 2, window_tokens))
    places = by_pair.transpose(-3, -2).flatten(-3, -2).transpose(-1, -2)
    if layout.places is not None:
        places = torch.tensor(layout.places, dtype=torch.float64, device=places.device)[places.long()]
    zero, scale = (_spread(layout, _grid(layout, codes, name), window_tokens, head_dim) for name in ("zero", "scale"))
    numbers: Tensor = zero + scale * places
    for step in layout.undone:
        numbers = _undo(step, numbers, codes)
    return numbers


def _numbers(packed: Tensor, bits: int) -> Tensor:
    """Whole numbers of so many bits, the first in the lowest bits of the first byte."""
    each_bit = (packed[..., None] >> torch.arange(8, device=packed.device)) & 1
    weights = 2.0 ** torch.arange(bits, device=packed.device).double()
    numbers: Tensor = (each_bit.flatten(-2).unflatten(-1, (-1, bits)).double() * weights).sum(-1)
    return numbers


def _grid(layout: PairedCodes, codes: Codes, name: str) -> Tensor:
    """Scales, or zero points."""
    if layout.scale_bits is None:
        return codes[name].double()
    least, step = codes[f"{name}_range"].double().split(1, dim=-1)
    grid: Tensor = least + step * _numbers(codes[name], layout.scale_bits)
    return grid


def _spread(layout: PairedCodes, grid: Tensor, window_tokens: int, head_dim: int) -> Tensor:
    """One for each number of a window."""
    if layout.per == "channel":
        return grid[..., None, :]
    by_group = grid.unflatten(-1, (-1, window_tokens))
    spread: Tensor = by_group.repeat_interleave(layout.group_channels or head_dim, dim=-2).transpose(-1, -2)
    return spread


def _undo(step: Undone, numbers: Tensor, codes: Codes) -> Tensor:
    if step == "hadamard":
        return _mixed(numbers)
    own = codes[step].double()
    if step == "norm":
        return numbers * own[..., None]
    return numbers * own[..., None, :] if step == "channel_scale" else numbers + own[..., None, :]


def _mixed(numbers: Tensor) -> Tensor:
    """Channels mixed by Sylvester's matrix, in blocks of the largest power of two that divides their number."""
    head_dim = numbers.shape[-1]
    block = head_dim & -head_dim
    matrix = torch.ones(1, 1, dtype=torch.float64, device=numbers.device)
    while matrix.shape[0] < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    mixed: Tensor = numbers.unflatten(-1, (-1, block)) @ matrix / 2 ** ((block.bit_length() - 1) // 2)
    return mixed.flatten(-2)
