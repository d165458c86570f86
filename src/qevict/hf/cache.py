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
from qevict.engine.engine import Engine, Incoming
from qevict.engine.report import Report, make_report
from qevict.engine.wiring import Wiring
from qevict.errors import InputError, InterruptedCacheError, NotAttachedError, UnsupportedOperationError
from qevict.hf import names
from qevict.hf.compiling import outside_graphs
from qevict.hf.layers import ruled, stock_layers, storage_bytes, text_config
from qevict.hf.support import wire
from qevict.hf.unwrapping import unwrap
from qevict.policy import Policy

TAG = "_qevict_layer"
"""Attribute by which keys carry their layer from ``update`` to the attention function."""


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

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hold the new keys for the attention call that follows; returns a fresh view that names this layer."""
        self.turn.begin(self)
        tagged = key_states.view(key_states.shape)
        setattr(tagged, TAG, self)
        return tagged, value_states

    @outside_graphs
    def get_seq_length(self) -> int:
        """Tokens seen, pads included; what is stored is another number."""
        return self.engine.clock.seen

    @outside_graphs
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks speak of tokens seen."""
        return self.engine.clock.seen + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> NoReturn:
        """Refused; a new cache costs nothing."""
        _refuse("reset", "make a new cache instead")

    def crop(self, tokens_to_remove: Any) -> NoReturn:
        """Refused: evicted tokens cannot come back."""
        _refuse(
            "crop", "assisted and prompt-lookup decoding are not supported; fork the cache before tokens you may undo"
        )

    def activate_past_recording(self) -> NoReturn:
        """The first thing that assisted decoding asks for; refused before any token."""
        _refuse("assisted decoding", "use greedy decoding or sampling")

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Refused."""
        _refuse("beam search", "use num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused."""
        _refuse("batch_repeat_interleave", "repeat the inputs before the prompt is cached")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Refused."""
        _refuse("batch_select_indices", "select the rows before the prompt is cached")

    def offload(self) -> NoReturn:
        """Refused."""
        _refuse("offloading", "a policy decides where bytes live")

    def prefetch(self) -> NoReturn:
        """Refused."""
        _refuse("offloading", "a policy decides where bytes live")


def lay_out(model: Any, engine: Steps) -> list[Any]:
    """A layer for each layer of the model: one that hands its tokens to the engine where the policy rules."""
    config = text_config(model)
    layers, turn = stock_layers(config), Turn(config)
    for own, index in enumerate(ruled(layers)):
        layers[index] = CacheLayer(own, engine, turn)
    return layers


class Cache(TransformersCache):
    """A KV cache that a policy rules: give it to ``model.generate`` or to a forward while the policy is attached.

    The policy rules the layers that keep every token. Layers with a sliding window stay the library's own: they drop
    tokens by themselves, and count neither for the budget nor against it.

    State lives here and nowhere else: caches on one model never disturb each other.

    Args:
        model: a model that a policy is attached to, or what wraps it.
        policy: what rules this cache; it need not be the attached one.

    Raises:
        NotAttachedError: nothing is attached to the model.
        UnsupportedModelError: the model cannot be served.
        PolicyError: the policy does not fit the model.
    """

    def __init__(self, model: Any, policy: Policy) -> None:
        model = unwrap(model)
        if getattr(model.config, "_attn_implementation", None) not in names.BASES:
            msg = "no policy is attached to this model; make the cache inside `with qevict.attach(model, policy):`"
            raise NotAttachedError(msg)
        self.engine = Engine.start(wire(model, policy))
        super().__init__(layers=lay_out(model, self.engine))

    def __bool__(self) -> bool:
        """False: Phi-3 drops a cache that is true, and so the policy, where a text outgrows its first context."""
        return False

    @property
    def wiring(self) -> Wiring:
        """Sizes and prices."""
        return self.engine.wiring

    @property
    def ruled_layers(self) -> tuple[int, ...]:
        """Indices of the layers of the model that the policy rules."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer, CacheLayer))

    @property
    def other_layers(self) -> list[Any]:
        """Layers that stay the library's own."""
        return [layer for layer in self.layers if not isinstance(layer, CacheLayer)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the new keys and values of a layer.

        Raises:
            InterruptedCacheError: an earlier forward broke off, so that some layers have seen more than others.
        """
        if layer_idx == 0 and self.engine.wiring.geometry.layers < len(self.layers):
            self._check_in_step()
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def _check_in_step(self) -> None:
        if len({layer.get_seq_length() for layer in self.layers}) > 1:
            msg = "a forward over this cache broke off half way, so its layers disagree; start again with a new cache"
            raise InterruptedCacheError(msg)

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
        if self.get_seq_length():
            _refuse("expect", "announce the prompt before the first forward")
        self.engine.clock.prompt_tokens = prompt_tokens

    def fork(self) -> "Cache":
        """An independent copy: ask many questions of one context, each on a fork of its own."""
        return copy.deepcopy(self)

    def kept_positions(self, layer: int) -> list[list[int]]:
        """True positions held in a layer of the model, lane by lane (rows, or rows x KV heads), whatever the tier.

        Raises:
            InputError: the policy does not rule that layer.
        """
        if layer not in self.ruled_layers:
            msg = f"layer {layer} is not ruled by the policy; ruled layers: {', '.join(map(str, self.ruled_layers))}"
            raise InputError(msg)
        return self.engine.kept_positions(self.ruled_layers.index(layer))

    def nbytes(self) -> int:
        """Bytes of everything allocated for this cache, the library's own layers included."""
        return self.engine.nbytes + storage_bytes(self.other_layers)

    def report(self) -> Report:
        """Bytes by kind, windows by tier, moves."""
        return make_report(self.engine, storage_bytes(self.other_layers))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_seq_length()} tokens seen, {self.nbytes()} bytes, {self.policy!r})"


def _refuse(what: str, remedy: str) -> NoReturn:
    msg = f"a qevict cache does not support {what}: {remedy}"
    raise UnsupportedOperationError(msg)


def layer_of(keys: torch.Tensor) -> CacheLayer | None:
    """The layer that sent these keys, or None for a foreign cache."""
    return getattr(keys, TAG, None)
