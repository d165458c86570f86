"""What a layer of the library holds, taken apart for a file and put together again, strictly."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qevict.contracts.values import Geometry
from qevict.errors import UnsupportedOperationError

_PLAIN = (int, float, bool, str, type(None))


def parted(layer: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Plain values and tensors of a layer; devices and dtypes follow from the tensors.

    Raises:
        UnsupportedOperationError: it holds something else.
    """
    held = {name: value for name, value in vars(layer).items() if not isinstance(value, torch.device | torch.dtype)}
    tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in held.items()
               if isinstance(value, Tensor)}  # fmt: skip
    plain = {name: value for name, value in held.items() if isinstance(value, _PLAIN)}
    if rest := held.keys() - tensors.keys() - plain.keys():
        msg = f"a {type(layer).__name__} cannot be saved: {', '.join(sorted(rest))} is neither a tensor nor a number"
        raise UnsupportedOperationError(msg)
    return {"type": type(layer).__name__, "values": plain}, tensors


def fill(
    layer: Any, plain: Mapping[str, Any], tensors: Mapping[str, Tensor], sizes: Geometry, rows: int, seen: int
) -> str | None:
    """Put saved values into a layer that is as new.

    Args:
        layer: of the model that the file belongs to.
        plain: numbers by name.
        tensors: by name.
        sizes: heads and channels of the model.
        rows: rows of the batch; 0 where no ruled layer tells.
        seen: tokens that the cache has seen, pads included.

    Returns:
        What is wrong with them; None if nothing is.
    """
    if plain.get("is_initialized"):
        if not {"keys", "values"} <= tensors.keys():
            return "it has no keys and values"
        if wrong := _shape(layer, tensors["keys"], tensors["values"], sizes, rows, seen):
            return wrong
        layer.lazy_initialization(tensors["keys"], tensors["values"])
    known, own = parted(layer)
    names = known["values"].keys() | own.keys()
    if (plain.keys() | tensors.keys()) != names:
        return f"it holds {sorted(plain.keys() | tensors.keys())}, wanted {sorted(names)}"
    for name, value in known["values"].items():
        if name in plain and type(plain[name]) is not type(value):
            return f"{name} is {plain[name]!r}"
    for name, value in (dict(plain) | dict(tensors)).items():
        setattr(layer, name, value)
    return None if layer.get_seq_length() in {seen, 0} else f"it has seen {layer.get_seq_length()} of {seen} tokens"


def _shape(layer: Any, keys: Tensor, values: Tensor, sizes: Geometry, rows: int, seen: int) -> str | None:
    most = min(seen, layer.sliding_window - 1)
    wanted = (rows or keys.shape[0], sizes.kv_heads, most, sizes.head_dim)
    if tuple(keys.shape) != wanted or values.shape != keys.shape or values.dtype != keys.dtype:
        found = [(tuple(each.shape), each.dtype) for each in (keys, values)]
        return f"its keys and values are {found}, wanted twice {wanted}"
    return None
