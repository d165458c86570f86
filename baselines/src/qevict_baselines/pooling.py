"""Pooling over windows that are neighbours in position, wherever their columns are."""

from typing import Literal

import attrs
import torch
from jaxtyping import Float32
from torch import Tensor
from torch.nn import functional

from qevict.errors import PolicyError
from qevict.shapes import LaneMask, LaneWindows

Pool = Literal["average", "max"]
"""Average counts what lies beyond an edge as zeros, so that edges are attenuated; max never takes it."""


def odd(_instance: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    """A kernel has a middle.

    Raises:
        PolicyError: the number is even, below 1, or no whole number.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % 2 == 0:
        msg = f"{attribute.name} is an odd whole number of at least 1 (1: no pooling), got {value!r}"
        raise PolicyError(msg)


def pooled(
    amounts: Float32[Tensor, "lanes *more windows"],
    positions: LaneWindows,
    among: LaneMask,
    kernel: int,
    pool: Pool = "average",
) -> Float32[Tensor, "lanes *more windows"]:
    """Each window's amount, pooled over its ``kernel`` nearest neighbours in order of position.

    Args:
        amounts: by window.
        positions: of the windows.
        among: the windows that are pooled; for them the others do not exist, and get 0.
        kernel: windows that are pooled into one; odd.
        pool: how.
    """
    if kernel == 1 or amounts.shape[-1] == 0:
        return amounts.masked_fill(~_along(among, amounts), 0)
    order = torch.where(among, positions, torch.iinfo(positions.dtype).max).argsort(dim=1)
    edge = 0.0 if pool == "average" else -torch.inf
    ordered = amounts.masked_fill(~_along(among, amounts), edge).gather(-1, _along(order, amounts))
    rows = ordered.reshape(1, -1, ordered.shape[-1])
    if pool == "average":
        rows = functional.avg_pool1d(rows, kernel, stride=1, padding=kernel // 2)
    else:
        rows = functional.max_pool1d(rows, kernel, stride=1, padding=kernel // 2)
    back = rows.reshape(ordered.shape).gather(-1, _along(order.argsort(dim=1), amounts))
    return back.masked_fill(~_along(among, amounts), 0)


def _along(by_window: Tensor, amounts: Tensor) -> Tensor:
    """A value per lane and window, for every amount."""
    return by_window.view(len(by_window), *[1] * (amounts.ndim - 2), -1).expand(amounts.shape)
