"""Synthetic contexts: keys, values and queries of any length, without running the model over a prompt.

Time does not depend on what the numbers say, only on how many there are; so all contestants of a round are given the
same ones, at lengths beyond what the model was trained for too. Keys have offsets by channel, as those of real models
do, so that quantizers meet their usual ranges.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qevict.contracts.rotary import Rotary
from qevict.contracts.values import Geometry
from qevict.engine.forward import Incoming
from qevict.hf.cache import Cache
from qevict.hf.recording import Recording
from qevict.hf.rotary import read_rotary

OFFSET = 2.0
"""Standard deviation of a channel's offset, relative to that of its noise."""


def geometry_of(model: Any) -> Geometry:
    """The sizes of a model's attention."""
    config = model.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Geometry(config.num_hidden_layers, heads, config.num_key_value_heads, head_dim, model.dtype)


def context(model: Any, lengths: Sequence[int], *, seed: int = 0) -> Recording:
    """What every layer's attention would be given of a prompt, left padded to the longest row.

    Args:
        model: whose shape, dtype and rotary table are taken.
        lengths: true tokens of each row.
        seed: equal seeds give equal contexts.
    """
    sizes, rotary = geometry_of(model), read_rotary(model)
    generator = torch.Generator().manual_seed(seed)
    valid, positions = _rows(lengths)
    shape = (len(lengths), sizes.q_heads, max(lengths), sizes.head_dim)
    query = rotary.rotate(torch.randn(shape, generator=generator), positions[:, None]).to(sizes.dtype)
    layers = (_layer(sizes, rotary, query, valid, positions, generator) for _ in range(sizes.layers))
    return Recording(tuple(layers))


def _rows(lengths: Sequence[int]) -> tuple[Tensor | None, Tensor]:
    """Which slots are real (None if all are), and their rotary positions."""
    longest = max(lengths)
    valid = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    positions = (valid.long().cumsum(1) - 1).clamp(min=0)
    return (None if bool(valid.all()) else valid), positions


def _layer(
    sizes: Geometry, rotary: Rotary, query: Tensor, valid: Tensor | None, positions: Tensor, generator: torch.Generator
) -> Incoming:
    """One layer: keys and values of its own, the queries that all layers share."""
    shape = (query.shape[0], sizes.kv_heads, query.shape[2], sizes.head_dim)
    offset = OFFSET * torch.randn(1, sizes.kv_heads, 1, sizes.head_dim, generator=generator)
    keys = rotary.rotate(torch.randn(shape, generator=generator) + offset, positions[:, None])
    return Incoming(
        query=query,
        keys=keys.to(sizes.dtype),
        values=torch.randn(shape, generator=generator).to(sizes.dtype),
        scaling=sizes.head_dim**-0.5,
        native=_unread,
        valid=valid,
        visible=None if valid is None else valid.sum(1),
        position_ids=positions,
    )


def _unread(keys: Tensor, _values: Tensor) -> Tensor:
    """The output of attention while a cache is filled: nobody reads it."""
    return keys.new_empty(0)


def fill(cache: Any, recording: Recording) -> None:
    """Let an empty cache take a context: through the engine if a policy rules it, as an update otherwise."""
    if isinstance(cache, Cache):
        recording.play_into(cache)
        return
    for index, incoming in enumerate(recording.incoming):
        cache.update(incoming.keys, incoming.values, index)
