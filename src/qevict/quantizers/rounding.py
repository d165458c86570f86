"""Round to a narrower float dtype in a chosen direction, so that a stored grid always covers its data."""

import torch
from torch import Tensor

_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest finite number of ``dtype`` that is at most ``x`` (the smallest finite one below the range)."""
    near = x.to(dtype).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return torch.where(near.float() > x, _step(near, up=False), near).clamp(min=torch.finfo(dtype).min)


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest finite number of ``dtype`` that is at least ``x`` (the largest finite one above the range)."""
    near = x.to(dtype).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return torch.where(near.float() < x, _step(near, up=True), near).clamp(max=torch.finfo(dtype).max)


def _step(x: Tensor, *, up: bool) -> Tensor:
    """The neighbouring number; floats of one sign are ordered as their bit patterns are."""
    bits = x.view(_BITS[x.dtype])
    away = (x > 0) == up
    stepped = torch.where(away, bits + 1, bits - 1).view(x.dtype)
    tiny = torch.ones((), dtype=_BITS[x.dtype], device=x.device).view(x.dtype)
    return torch.where(x == 0, tiny if up else -tiny, stepped)
