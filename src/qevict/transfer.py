"""Host numbers to the device, without waiting for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of host numbers; on an accelerator through pinned memory, so that the copy does not synchronise."""
    tensor = torch.tensor(numbers, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory(device).to(device, non_blocking=True)
