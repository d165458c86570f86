"""Which layers of a model a policy rules, and which stay the library's own."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


def text_config(model: Any) -> Any:
    """The configuration of a model's text decoder; a model of several modalities keeps it inside its own."""
    return model.config.get_text_config(decoder=True)


def library_layers(config: Any) -> list[Any]:
    """Cache layers as the library makes them for a text configuration, and None where a policy rules.

    A policy rules the layers that keep every token, and so leave something to decide. A layer with a sliding window
    drops tokens by itself; it stays the library's.
    """
    return [None if type(layer) is DynamicLayer else layer for layer in DynamicCache(config=config).layers]


def storage_bytes(layers: list[Any]) -> int:
    """Bytes of the storages that layers of the library hold; a slice keeps the whole of what it was cut from."""
    tensors = [value for layer in layers for value in vars(layer).values() if isinstance(value, Tensor)]
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
    return sum(storage.nbytes() for storage in storages.values())
