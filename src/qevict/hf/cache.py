"""The cache that a model's forward fills: transformers' surface over the engine."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from qevict.engine.clock import Clock
from qevict.engine.cropping import crop
from qevict.engine.engine import Engine, Incoming
from qevict.engine.report import Report, make_report
from qevict.engine.selection import select
from qevict.engine.wiring import Wiring
from qevict.errors import InputError, NotAttachedError, UnsupportedOperationError
from qevict.hf import names
from qevict.hf.compat import empty_layer
from qevict.hf.reading import check_rows
from qevict.hf.removal import check_removal, crop_layers
from qevict.hf.support import wire
from qevict.policy import Policy

TAG = "_qevict_layer"
"""Attribute by which keys carry their layer from ``update`` to the attention function."""

_TOGETHER = "call the method of the cache, which changes all its layers together"


@contextlib.contextmanager
def plain_arithmetic(device: str) -> Iterator[None]:
    """Scores and decoded keys are fp32 whatever the model computes in, and a cache outlives any autograd graph."""
    if not (torch.is_autocast_enabled(device) or torch.is_inference_mode_enabled() or torch.is_grad_enabled()):
        yield  # as it is within generate: entering three contexts in every layer of every token would be felt
        return
    with torch.autocast(device, enabled=False), torch.inference_mode(mode=False), torch.no_grad():
        yield


@attrs.define(eq=False)
class Turn:
    """The handshake between ``update`` and attention: whose keys are on the way. Shared by the layers of one cache."""

    config: Any
    pending: "CacheLayer | None" = None

    def begin(self, layer: "CacheLayer") -> None:
        """Keys leave ``layer`` for attention.

        Raises:
            NotAttachedError: the model does not attend through this library, so nobody would pick them up.
        """
        waiting, self.pending = self.pending, None
        if waiting is not None or self.config._attn_implementation not in names.BASES:
            msg = (
                "nobody picks up the keys of this cache: use `with qevict.attach(model, policy):` around every forward "
                "and generate that is given it, with the model that it was made for"
            )
            raise NotAttachedError(msg)
        self.pending = layer

    def end(self) -> None:
        """Attention has picked them up."""
        self.pending = None

    def __deepcopy__(self, _memo: object) -> "Turn":
        return Turn(self.config)


@runtime_checkable
class Steps(Protocol):
    """What a layer hands its tokens to: an engine, or what stands in for one."""

    @property
    def clock(self) -> Clock:
        """How far each row is."""

    def step(self, index: int, incoming: Incoming) -> Tensor:
        """One layer's part of a forward."""


class CacheLayer(CacheLayerMixin):
    """One owned layer. Stores nothing itself: its keys and values live in the engine's pools."""

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, index: int, engine: Steps, turn: Turn) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.index, self.engine, self.turn = index, engine, turn

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the engine opens a layer at its first step."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hold the new keys for the attention call that follows; returns a fresh view that names this layer."""
        self.turn.begin(self)
        tagged = key_states.view(key_states.shape)
        setattr(tagged, TAG, self)
        return tagged, value_states

    def get_seq_length(self) -> int:
        """Tokens seen, pads included; what is stored is another number."""
        return self.engine.clock.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks speak of tokens seen."""
        return self.engine.clock.seen + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> NoReturn:
        """Refused for one layer: the layers of a cache are changed together."""
        _refuse("reset of one layer", _TOGETHER)

    def crop(self, tokens_to_remove: Any) -> NoReturn:
        """Refused for one layer."""
        _refuse("crop of one layer", _TOGETHER)

    def activate_past_recording(self) -> NoReturn:
        """The first thing that assisted decoding asks for; refused before any token."""
        _refuse("assisted decoding", "use greedy decoding or sampling")

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Refused for one layer."""
        _refuse("reorder_cache of one layer", _TOGETHER)

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused for one layer."""
        _refuse("batch_repeat_interleave of one layer", _TOGETHER)

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Refused for one layer."""
        _refuse("batch_select_indices of one layer", _TOGETHER)

    def offload(self) -> NoReturn:
        """Refused."""
        _refuse("offloading", "a policy decides where bytes live")

    def prefetch(self) -> NoReturn:
        """Refused."""
        _refuse("offloading", "a policy decides where bytes live")


class Cache(TransformersCache):
    """A KV cache that a policy rules: give it to ``model.generate`` or to a forward while the policy is attached.

    State lives here and nowhere else: caches on one model never disturb each other.

    Args:
        model: a model that a policy is attached to.
        policy: what rules this cache; it need not be the attached one.

    Raises:
        NotAttachedError: nothing is attached to the model.
        UnsupportedModelError: the model cannot be served.
        PolicyError: the policy does not fit the model.
    """

    def __init__(self, model: Any, policy: Policy) -> None:
        if getattr(model.config, "_attn_implementation", None) not in names.BASES:
            msg = "no policy is attached to this model; make the cache inside `with qevict.attach(model, policy):`"
            raise NotAttachedError(msg)
        self.engine, turn = Engine.start(wire(model, policy)), Turn(model.config)
        owned = range(self.engine.wiring.geometry.layers)
        super().__init__(layers=[CacheLayer(index, self.engine, turn) for index in owned])

    @property
    def wiring(self) -> Wiring:
        """Sizes and prices."""
        return self.engine.wiring

    @property
    def policy(self) -> Policy:
        """What rules this cache."""
        return self.wiring.policy

    def expect(self, prompt_tokens: int) -> None:
        """Announce the length of the prompt, pads included, so that it may come in several forwards.

        Without it, the first forward is the prompt.

        Raises:
            UnsupportedOperationError: the prompt is over.
        """
        if prompt_tokens < 1:
            msg = f"a prompt has at least 1 token, got prompt_tokens={prompt_tokens}"
            raise InputError(msg)
        if self.engine.clock.seen:
            _refuse("expect", "announce the prompt before the first forward")
        self.engine.clock.prompt_tokens = prompt_tokens

    def fork(self) -> "Cache":
        """An independent copy: ask many questions of one context, each on a fork of its own."""
        return copy.deepcopy(self)

    def reset(self) -> None:
        """Be empty again, as new, also after a forward that broke off; an announced prompt is forgotten too."""
        self.engine.reset()
        for layer in self.layers:
            if isinstance(layer, CacheLayer):
                layer.turn.end()
            else:
                empty_layer(layer)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take the last tokens of every row back, exactly as if they had never come; refused where that cannot be.

        It can be for scorers that remember nothing, if no routing event came with or after these tokens, or if nothing
        was evicted or encoded yet.

        Args:
            tokens_to_remove: 0, or minus the number of tokens, pads included.

        Raises:
            InputError: a positive number, or more than can go.
            UnsupportedOperationError: it cannot be done exactly; the message says why.
            InterruptedCacheError: a forward over the cache broke off half way.
        """
        count = check_removal(tokens_to_remove)
        self.engine.check_whole()
        if count:
            others = crop_layers(self.library_layers, count)
            crop(self.engine, count)
            self.layers = [layer if isinstance(layer, CacheLayer) else next(others) for layer in self.layers]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put row ``beam_idx[i]`` in the place of row ``i``, in every layer and tier, as beam search does.

        Args:
            beam_idx: ``[rows]`` whole numbers; a row may be named more than once, or not at all.

        Raises:
            InputError: these are no rows of the cache.
            InterruptedCacheError: a forward over the cache broke off half way.
        """
        self._select(beam_idx, "reorder_cache", beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows, in the order of ``indices``.

        Args:
            indices: ``[rows]`` whole numbers; a row may be named more than once.

        Raises:
            InputError: these are no rows of the cache.
            InterruptedCacheError: a forward over the cache broke off half way.
        """
        self._select(indices, "batch_select_indices", indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have every row ``repeats`` times, side by side.

        Raises:
            InputError: ``repeats`` is no whole number, or below 1.
            InterruptedCacheError: a forward over the cache broke off half way.
        """
        if not isinstance(repeats, int) or repeats < 1:
            msg = f"rows are repeated a whole number of times, 1 or more; got repeats={repeats!r}"
            raise InputError(msg)
        rows = torch.arange(len(self.engine.clock.tokens)).repeat_interleave(repeats)
        self._select(rows, "batch_repeat_interleave", repeats)

    def _select(self, rows: Tensor, method: str, argument: Tensor | int) -> None:
        """Let all layers follow; those of the library by their own method."""
        held = len(self.engine.clock.tokens)
        self.engine.check_whole()
        if held and (order := check_rows(rows, held)) != [*range(held)]:
            select(self.engine, order)
            for layer in self.library_layers:
                getattr(layer, method)(argument)

    @property
    def library_layers(self) -> list[Any]:
        """Layers that no policy owns: the library's own, which drop tokens by a rule of the model."""
        return [layer for layer in self.layers if not isinstance(layer, CacheLayer)]

    def kept_positions(self, layer: int) -> list[list[int]]:
        """True positions held in a layer, lane by lane (rows, or rows x KV heads), whatever the tier."""
        return self.engine.kept_positions(layer)

    def nbytes(self) -> int:
        """Bytes of everything allocated for this cache."""
        return self.engine.nbytes

    def report(self) -> Report:
        """Bytes by kind, windows by tier, moves."""
        return make_report(self.engine)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine.clock.seen} tokens seen, {self.nbytes()} bytes, {self.policy!r})"


def _refuse(what: str, remedy: str) -> NoReturn:
    msg = f"a qevict cache does not support {what}: {remedy}"
    raise UnsupportedOperationError(msg)


def layer_of(keys: torch.Tensor) -> CacheLayer | None:
    """The layer that sent these keys, or None for a foreign cache."""
    return getattr(keys, TAG, None)
