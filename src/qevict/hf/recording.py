"""A prompt that the model reads once, to be taken by the caches of many policies."""

import copy
from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from qevict.engine.clock import Clock
from qevict.engine.forward import Incoming
from qevict.errors import InputError, UnsupportedOperationError
from qevict.hf.cache import Cache
from qevict.hf.layer import CacheLayer, Turn, plain_arithmetic, with_owned
from qevict.hf.layers import library_layers, storage_bytes, text_config
from qevict.hf.reading import read_into


@attrs.frozen(eq=False)
class Recording:
    """What the attention of each layer was given when a prompt was read.

    A policy compresses when the prompt has ended, so nothing that a layer computes for the prompt depends on the
    policy: one recording serves them all. It holds queries, keys and values of every token in every layer that a policy
    rules, and the other layers as they are after the prompt.

    Attributes:
        incoming: by layer that a policy rules.
        others: the library's own layers, by index.
    """

    incoming: tuple[Incoming, ...]
    others: dict[int, Any] = attrs.field(factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the recorded tensors."""
        recorded = sum(layer.query.nbytes + layer.keys.nbytes + layer.values.nbytes for layer in self.incoming)
        return recorded + storage_bytes(list(self.others.values()))

    def until(self, tokens: int) -> "Recording":
        """The first tokens alone, as if no more had been read: no token of the rest has told on them.

        Raises:
            InputError: there are not that many tokens.
            UnsupportedOperationError: the prompt has pads, or layers of the library, which have dropped tokens already.
        """
        held = self.incoming[0].query.shape[2] if self.incoming else 0
        valid = self.incoming[0].valid if self.incoming else None
        if not 1 <= tokens <= held:
            msg = f"a recording of {held} tokens can be cut behind 1 ... {held} of them, got {tokens}"
            raise InputError(msg)
        if self.others or (valid is not None and not valid.all()):
            msg = "a recording with pads, or of sliding windows, cannot be cut; record the first tokens alone"
            raise UnsupportedOperationError(msg)
        return Recording(tuple(_first(layer, tokens) for layer in self.incoming))

    def play_into(self, cache: Cache) -> None:
        """Let an empty cache take the prompt as if the model had read it; scores, routing and bytes are the same.

        Raises:
            UnsupportedOperationError: the cache has seen tokens, or belongs to a model of another shape.
            InterruptedCacheError: a forward over the cache broke off half way.
        """
        if not self.incoming:
            msg = "no layer of the recorded model can be ruled by a policy; read the prompt with session.prefill"
            raise UnsupportedOperationError(msg)
        engine, first = cache.engine, self.incoming[0]
        geometry = engine.wiring.geometry
        shape = (geometry.layers, geometry.q_heads, geometry.kv_heads, geometry.head_dim)
        recorded = (len(self.incoming), first.query.shape[1], first.keys.shape[1], first.keys.shape[3])
        cache.check_whole()
        engine.check_repeated()
        local = {index: layer for index, layer in enumerate(cache.layers) if index not in cache.ruled_layers}
        if engine.clock.seen or shape != recorded or _forms(local) != _forms(self.others):
            msg = (
                f"a recording plays into an empty cache of a model of its own shape; recorded (layers, query heads, KV "
                f"heads, head_dim) {recorded}, the cache has {shape} and has seen {engine.clock.seen} tokens"
            )
            raise UnsupportedOperationError(msg)
        cache.expect(first.query.shape[2])
        for index, layer in self.others.items():
            cache.layers[index] = copy.deepcopy(layer)
        with plain_arithmetic(first.query.device.type):
            for index, incoming in enumerate(self.incoming):
                engine.step(index, incoming)


def _first(layer: Incoming, tokens: int) -> Incoming:
    """What a layer was given of the first tokens."""
    query, keys, values = (part[:, :, :tokens] for part in (layer.query, layer.keys, layer.values))
    return attrs.evolve(
        layer,
        query=query,
        keys=keys,
        values=values,
        valid=None if layer.valid is None else layer.valid[:, :tokens],
        visible=None if layer.visible is None else layer.visible.clamp(max=tokens),
        position_ids=layer.position_ids[:, :tokens],
    )


def _forms(layers: Mapping[int, Any]) -> dict[int, tuple[type, object]]:
    """What layers of the library are, and how far back they look."""
    return {index: (type(layer), getattr(layer, "sliding_window", None)) for index, layer in layers.items()}


@attrs.frozen(eq=False)
class _Recorder:
    """Stands where a cache's engine stands: lets the model attend on its own, and takes down what it was given."""

    clock: Clock = attrs.field(factory=lambda: Clock(period_tokens=1))
    incoming: list[Incoming] = attrs.field(factory=list)

    def step(self, index: int, incoming: Incoming) -> Tensor:
        # The keys come with their layer, which would keep recorder and recording alive in a circle.
        self.incoming.append(attrs.evolve(incoming, keys=incoming.keys.detach(), native=_unread))
        return incoming.native(incoming.keys, incoming.values)


def _unread(keys: Tensor, _values: Tensor) -> Tensor:
    """The output of attention during a replay: nobody reads it."""
    return keys.new_empty(0)


def record(model: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> Recording:
    """Read a prompt; the model must have a policy attached, whichever.

    Raises:
        InputError: the prompt is empty.
    """
    recorder, config = _Recorder(), text_config(model)
    layers = with_owned(library_layers(config), recorder, Turn(config))
    read_into(TransformersCache(layers=layers), model, input_ids, attention_mask)
    others = {index: layer for index, layer in enumerate(layers) if not isinstance(layer, CacheLayer)}
    return Recording(tuple(recorder.incoming), others)
