"""Tensors, and the frozen values that carry them: copied, moved and compared without asking any part."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, cast

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import Attended, EncodedSegment, Query, View
from qevict.contracts.output import OutputProjection
from qevict.contracts.rotary import Rotary
from qevict.contracts.values import Costs, Held, MovePlan, Observation, Windows

CARRIERS = (
    Attended,
    Costs,
    EncodedSegment,
    Held,
    MovePlan,
    Observation,
    OutputProjection,
    Query,
    Rotary,
    View,
    Windows,
)
"""Values of the contracts that carry tensors."""

ValueT = TypeVar("ValueT")


class Finding(AssertionError):  # noqa: N818 - what a law found, on the way into a report
    """What was found where a law does not hold."""


def require(holds: bool | Tensor, finding: str) -> None:  # noqa: FBT001 - a condition, as in an assert
    """Raise what was found, unless the condition holds."""
    __tracebackhide__ = True
    if not bool(holds):
        raise Finding(finding)


def map_tensors(change: Callable[[Tensor], Tensor], value: ValueT) -> ValueT:
    """Replace every tensor in a value of the contracts, a mapping or a tuple."""
    mapped: object = value
    if isinstance(value, Tensor):
        mapped = change(value)
    elif isinstance(value, Mapping):
        mapped = {name: map_tensors(change, each) for name, each in value.items()}
    elif isinstance(value, tuple | list):
        mapped = type(value)(map_tensors(change, each) for each in value)
    elif isinstance(value, CARRIERS):
        fields = {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
        mapped = type(value)(**map_tensors(change, fields))
    return cast("ValueT", mapped)


def tensors_of(value: object) -> list[Tensor]:
    """Every tensor in a value, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    parts: Iterable[object] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, tuple | list):
        parts = value
    elif isinstance(value, CARRIERS):
        parts = (getattr(value, field.name) for field in attrs.fields(type(value)))
    return [tensor for each in parts for tensor in tensors_of(each)]


def copied(value: ValueT) -> ValueT:
    """The same value in storages of its own."""
    return map_tensors(lambda tensor: tensor.detach().clone(), value)


def moved(value: ValueT, device: torch.device) -> ValueT:
    """The same value on a device."""
    return map_tensors(lambda tensor: tensor.to(device), value)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal shape, dtype and bit patterns, so that NaN equals NaN and 0 is not -0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    one, other = (each.detach().cpu().contiguous().flatten().view(torch.uint8) for each in (left, right))
    return bool((one == other).all())


def same_values(left: object, right: object) -> bool:
    """Whether two values hold the same tensors, bit for bit, under the same names."""
    if isinstance(left, Mapping) and isinstance(right, Mapping) and left.keys() != right.keys():
        return False
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return all(same_values(left[name], right[name]) for name in left)
    one, other = tensors_of(left), tensors_of(right)
    return len(one) == len(other) and all(map(same_bits, one, other))


def close(left: Tensor, right: Tensor, tolerance: float = 1e-5) -> bool:
    """Equal up to a relative and absolute tolerance; infinities and NaN are equal to themselves."""
    if left.shape != right.shape:
        return False
    one, other = left.detach().double().cpu(), right.detach().double().cpu()
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def gap(left: Tensor, right: Tensor) -> str:
    """Where two tensors differ most, for a finding."""
    if left.shape != right.shape:
        return f"shape {tuple(left.shape)} against {tuple(right.shape)}"
    one, other = left.detach().double().cpu(), right.detach().double().cpu()
    apart = torch.where(one == other, 0.0, (one - other).abs()).nan_to_num(nan=torch.inf)
    if apart.numel() == 0 or float(apart.max()) == 0:
        return "equal values, other bits or dtype"
    worst = int(apart.argmax())
    place = tuple(int(each) for each in torch.unravel_index(torch.tensor(worst), apart.shape))
    return f"{float(one.flatten()[worst]):.7g} against {float(other.flatten()[worst]):.7g} at {place}"


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(seed: int, *shape: int) -> Tensor:
    """Numbers in [0, 1), the same for the same seed."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def random_bits(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Every bit pattern that a dtype has, NaN and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return drawn.view(dtype).squeeze(-1)
