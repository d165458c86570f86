"""Attention alone, layer after layer: what a step costs without the model's weights."""

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

import qevict
from benchmarks.decoding import CYCLE_TOKENS
from benchmarks.synthetic import context, geometry_of
from qevict.engine.forward import Incoming
from qevict.hf.layer import plain_arithmetic

_L3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_UNITS = {"K": 2**10, "M": 2**20}


def l3_bytes() -> int | None:
    """Bytes of the last cache of the CPU; None where the system does not say."""
    if not _L3.is_file():
        return None
    text = _L3.read_text().strip()
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text)


def copies_beyond(least_bytes: int, limit_bytes: float) -> int:
    """How many copies of a cache of that size must take turns so that none is still in the CPU's cache."""
    return max(1, math.ceil(limit_bytes / least_bytes))


def attender(model: Any, cache: Any, tokens: int, copies: int) -> Callable[[], None]:
    """What lets one more cycle of tokens through the attention of every layer of every copy.

    Args:
        model: whose shapes and layers are taken.
        cache: filled with that many tokens.
        tokens: true tokens of its one row.
        copies: caches that take turns at every token.
    """
    caches = [cache, *(copy.deepcopy(cache) for _ in range(copies - 1))]
    new = context(model, [1], seed=1).incoming
    run = _through_engine if isinstance(cache, qevict.Cache) else _through_sdpa

    def cycle() -> None:
        nonlocal tokens
        for _ in range(CYCLE_TOKENS):
            position = torch.tensor([[tokens]])
            for each in caches:
                run(model, each, new, position)
            tokens += 1

    return cycle


def _through_engine(_model: Any, cache: qevict.Cache, new: Sequence[Incoming], position: Tensor) -> None:
    with plain_arithmetic("cpu"):
        for index, own in enumerate(new):
            given = (own.query, own.keys, own.values, own.scaling, own.native, None, None)
            cache.engine.step(index, Incoming(*given, position_ids=position))


def _through_sdpa(model: Any, cache: Any, new: Sequence[Incoming], _position: Tensor) -> None:
    attend = AttentionInterface()[model.config._attn_implementation]  # noqa: SLF001 - as transformers looks it up
    scaling = geometry_of(model).head_dim ** -0.5
    for index, own in enumerate(new):
        keys, values = cache.update(own.keys, own.values, index)
        attend(model.base_model.layers[index].self_attn, own.query, keys, values, None, scaling=scaling, is_causal=None)
