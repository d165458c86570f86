"""Numbers that are kept beside a grid: so many of each window, each with its place."""

import torch
from torch import Tensor

from qevict.contracts.values import ArraySpec, Codes, Layout
from qevict.errors import PolicyError

VALUES, PLACES = "outliers", "places"
_MOST_PLACES = 2**15


def outliers_of(part: float, window_tokens: int, head_dim: int) -> int:
    """How many numbers of a window are kept: that part of them, rounded up."""
    return -int(-part * window_tokens * head_dim // 1)


def sparse_layout(count: int, window_tokens: int, head_dim: int) -> Layout:
    """Two arrays of 16 bits for each number that is kept.

    Raises:
        PolicyError: a place in such windows does not fit into 16 bits.
    """
    if not count:
        return {}
    if window_tokens * head_dim > _MOST_PLACES:
        msg = (
            f"places of outliers have 16 bits, so window_tokens x head_dim must be {_MOST_PLACES} at most, got "
            f"{window_tokens} x {head_dim}; give shorter windows"
        )
        raise PolicyError(msg)
    return {VALUES: ArraySpec((count,), torch.float16), PLACES: ArraySpec((count,), torch.int16)}


def farthest(excess: Tensor, count: int) -> Tensor:
    """Places of the numbers that lie farthest out, of windows ``[..., window, head_dim]`` flattened; ties by place.

    Sorted, since ``topk`` leaves open which of equal numbers it gives.
    """
    return excess.flatten(-2).argsort(dim=-1, descending=True, stable=True)[..., :count]


def taken_out(x: Tensor, places: Tensor) -> Codes:
    """What is stored of some numbers; nothing for none."""
    if not places.shape[-1]:
        return {}
    most = torch.finfo(torch.float16).max
    values = x.flatten(-2).gather(-1, places).clamp(-most, most)
    return {VALUES: values.half(), PLACES: places.to(torch.int16)}


def put_back(x: Tensor, codes: Codes) -> Tensor:
    """Windows with the numbers that were kept."""
    if VALUES not in codes:
        return x
    flat = x.flatten(-2).scatter(-1, codes[PLACES].long(), codes[VALUES].float())
    return flat.view_as(x)
