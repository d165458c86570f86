"""One layer of a cache, as transformers calls it: it stores nothing, and hands what comes to the engine."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from qevict.engine.clock import Clock
from qevict.engine.forward import Incoming
from qevict.errors import NotAttachedError, UnsupportedOperationError
from qevict.hf import names
from qevict.hf.compiling import outside_graphs

TAG = "_qevict_layer"
"""Attribute by which keys carry their layer from ``update`` to the attention function."""

_TOGETHER = "call the method of the cache, which changes all its layers together"


_AS_IT_IS = contextlib.nullcontext()


@contextlib.contextmanager
def _made_plain(device: str) -> Iterator[None]:
    with torch.autocast(device, enabled=False), torch.inference_mode(mode=False), torch.no_grad():
        yield


def plain_arithmetic(device: str) -> contextlib.AbstractContextManager[None]:
    """Scores and decoded keys are fp32 whatever the model computes in, and a cache outlives any autograd graph."""
    if torch.is_autocast_enabled(device) or torch.is_inference_mode_enabled() or torch.is_grad_enabled():
        return _made_plain(device)
    return _AS_IT_IS  # within generate: entering contexts in every layer of every token would be felt


@attrs.define(eq=False)
class Turn:
    """The handshake between ``update`` and attention: whose keys are on the way. Shared by the layers of one cache.

    Attributes:
        config: of the model; None where the cache was pickled, which leaves its model behind.
        pending: the layer whose keys are on the way.
    """

    config: Any
    pending: "CacheLayer | None" = None

    def begin(self, layer: "CacheLayer") -> None:
        """Keys leave ``layer`` for attention.

        Raises:
            NotAttachedError: the model does not attend through this library, so nobody would pick them up.
        """
        waiting, self.pending = self.pending, None
        if waiting is not None or (layer.index == 0 and not self._attached()):  # the first layer asks for all
            msg = (
                "nobody picks up the keys of this cache: use `with qevict.attach(model, policy):` around every forward "
                "and generate that is given it, with the model that it was made for"
            )
            raise NotAttachedError(msg)
        self.pending = layer

    def _attached(self) -> bool:
        return self.config is None or self.config._attn_implementation in names.BASES

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
        """Refused for one layer: the layers of a cache are changed together."""
        refuse("reset of one layer", _TOGETHER)

    def crop(self, tokens_to_remove: Any) -> NoReturn:
        """Refused for one layer."""
        refuse("crop of one layer", _TOGETHER)

    def activate_past_recording(self) -> NoReturn:
        """The first thing that assisted decoding asks for; refused before any token."""
        refuse("assisted decoding", "use greedy decoding or sampling")

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Refused for one layer."""
        refuse("reorder_cache of one layer", _TOGETHER)

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused for one layer."""
        refuse("batch_repeat_interleave of one layer", _TOGETHER)

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Refused for one layer."""
        refuse("batch_select_indices of one layer", _TOGETHER)

    def offload(self) -> NoReturn:
        """Refused."""
        refuse("offloading", "a policy decides where bytes live")

    def prefetch(self) -> NoReturn:
        """Refused."""
        refuse("offloading", "a policy decides where bytes live")


def with_owned(layers: Sequence[Any], engine: Steps, turn: Turn) -> list[Any]:
    """Layers of a cache: owned ones, which hand their tokens to an engine, in the places where there is None."""
    owned = itertools.count()
    return [CacheLayer(next(owned), engine, turn) if own is None else own for own in layers]


def layer_of(keys: torch.Tensor) -> CacheLayer | None:
    """The layer that sent these keys, or None for a foreign cache."""
    return getattr(keys, TAG, None)


def refuse(what: str, remedy: str) -> NoReturn:
    """Say that a cache cannot do something.

    Raises:
        UnsupportedOperationError: always.
    """
    msg = f"a qevict cache does not support {what}: {remedy}"
    raise UnsupportedOperationError(msg)
