"""Counts the bytes of distinct storages that an object can reach, without asking it."""

from collections.abc import Iterator

import torch
from torch import Tensor

_LEAVES = (str, bytes, int, float, bool, type(None), type, torch.dtype, torch.device)


def reachable_tensors(root: object) -> Iterator[Tensor]:
    """Every tensor reachable through attributes, slots and containers."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _LEAVES):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
            waiting.extend(vars(item).values())
            continue
        waiting.extend(_children(item))


def _children(item: object) -> list[object]:
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    own = [getattr(item, name) for name in slots if isinstance(name, str) and hasattr(item, name)]
    return [*own, *getattr(item, "__dict__", {}).values()]


def reachable_bytes(root: object) -> int:
    """Bytes of the distinct storages."""
    storages = {}
    for tensor in reachable_tensors(root):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
