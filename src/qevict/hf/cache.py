"""The cache that a model's forward fills: transformers' surface over the engine."""

import copy
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from qevict.engine.cropping import crop
from qevict.engine.engine import Engine
from qevict.engine.report import Report, make_report
from qevict.engine.selection import select
from qevict.engine.snapshot import Snapshot, restore, take
from qevict.engine.wiring import Wiring
from qevict.errors import InputError, InterruptedCacheError, NotAttachedError
from qevict.hf import names, saving
from qevict.hf.compat import empty_layer
from qevict.hf.compiling import outside_graphs
from qevict.hf.layer import CacheLayer, Turn, plain_arithmetic, refuse, with_owned
from qevict.hf.layers import library_layers, storage_bytes, text_config
from qevict.hf.reading import check_rows
from qevict.hf.removal import check_removal, crop_layers
from qevict.hf.support import wire
from qevict.hf.unwrapping import unwrap
from qevict.policy import Policy


class Cache(TransformersCache):
    """A KV cache that a policy rules: give it to ``model.generate`` or to a forward while the policy is attached.

    The policy rules the layers that keep every token; those with a sliding window stay the library's, unbudgeted.

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
        config = text_config(model)
        self._compose(Engine.start(wire(model, policy)), Turn(config), library_layers(config))
        self._model: weakref.ref[Any] | None = weakref.ref(model)

    def _compose(self, engine: Engine, turn: Turn, layers: Sequence[Any]) -> None:
        """Put owned layers where there is None among the layers of the library."""
        self.engine, self._model = engine, None
        super().__init__(layers=with_owned(layers, engine, turn))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cache":
        self.check_whole()
        memo[id(self)] = other = Cache.__new__(Cache)
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        self.check_whole()
        layers = [None if isinstance(layer, CacheLayer) else layer for layer in self.layers]
        return _revive, (self.wiring, take(self.engine), layers)

    def __bool__(self) -> bool:
        """False: Phi-3 drops a cache that is true, and so the policy, where a text outgrows its first context."""
        return False

    @property
    def wiring(self) -> Wiring:
        """Sizes and prices."""
        return self.engine.wiring

    @property
    def policy(self) -> Policy:
        """What rules this cache."""
        return self.wiring.policy

    @property
    def ruled_layers(self) -> tuple[int, ...]:
        """Indices of the layers of the model that the policy rules."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer, CacheLayer))

    @property
    def library_layers(self) -> list[Any]:
        """Layers that no policy rules: the library's own, which drop tokens by a rule of the model."""
        return [layer for layer in self.layers if not isinstance(layer, CacheLayer)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the new keys and values of a layer.

        Raises:
            InterruptedCacheError: an earlier forward broke off, so that some layers have seen more than others.
        """
        if layer_idx == 0:
            self._check_in_step()
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def check_whole(self) -> None:
        """Refuse to speak of a cache whose layers disagree.

        Raises:
            InterruptedCacheError: a forward over it broke off half way, or was refused behind layers of the library.
        """
        self.engine.check_whole()
        self._check_in_step()

    @outside_graphs
    def _check_in_step(self) -> None:
        if self.library_layers and len({self.get_seq_length(index) for index in range(len(self.layers))}) > 1:
            msg = "a forward over this cache broke off half way, so its layers disagree; reset it, or make a new cache"
            raise InterruptedCacheError(msg)

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
            refuse("expect", "announce the prompt before the first forward")
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

        It can be for scorers that remember nothing, if no routing event came since, or if nothing was given up yet; and
        while the text is shorter than the sliding window of any layer.

        Args:
            tokens_to_remove: 0, or minus the number of tokens, pads included.

        Raises:
            InputError: a positive number, or more than can go.
            UnsupportedOperationError: it cannot be done exactly; the message says why.
            InterruptedCacheError: a forward over the cache broke off half way.
        """
        self.check_whole()
        count = check_removal(tokens_to_remove, self.get_seq_length())
        if count:
            others = crop_layers(self.library_layers, count)
            if self.ruled_layers:
                with plain_arithmetic(self.wiring.device.type):
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
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows, in the order of ``indices``.

        Args:
            indices: ``[rows]`` whole numbers; a row may be named more than once.

        Raises:
            InputError: these are no rows of the cache.
            InterruptedCacheError: a forward over the cache broke off half way.
        """
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have every row ``repeats`` times, side by side.

        Raises:
            InputError: ``repeats`` is no whole number, or below 1.
        """
        if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
            msg = f"rows are repeated a whole number of times, 1 or more; got repeats={repeats!r}"
            raise InputError(msg)
        self._select(torch.arange(self.rows).repeat_interleave(repeats))

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before the first forward."""
        others = (layer.keys.shape[0] for layer in self.library_layers if layer.is_initialized)
        return len(self.engine.clock.tokens) or next(others, 0)

    def _select(self, rows: Tensor) -> None:
        """Let all layers follow."""
        held = self.rows
        self.check_whole()
        if held and (order := check_rows(rows, held)) != [*range(held)]:
            if self.ruled_layers:
                with plain_arithmetic(self.wiring.device.type):
                    select(self.engine, order)
            for layer in self.library_layers:
                layer.batch_select_indices(torch.tensor(order, device=layer.keys.device))

    def activate_past_recording(self) -> None:
        """The first thing that assisted decoding asks for; refused before any layer hears of it."""
        refuse("assisted decoding", "use greedy decoding or sampling")

    def kept_positions(self, layer: int) -> list[list[int]]:
        """True positions held in a layer of the model, lane by lane (rows, or rows x KV heads), whatever the tier.

        Raises:
            InputError: the policy does not rule that layer.
        """
        if layer not in self.ruled_layers:
            msg = f"layer {layer} is not ruled by the policy; ruled layers: {', '.join(map(str, self.ruled_layers))}"
            raise InputError(msg)
        return self.engine.kept_positions(self.ruled_layers.index(layer))

    def save(self, path: str | os.PathLike[str], model: Any = None) -> None:
        """Write this cache, its policy included, to a file that :meth:`load` reads. Nothing in it is pickled.

        The file takes the place of an older one only when it is complete.

        Args:
            path: the file; safetensors is its format.
            model: the model that filled this cache; None for the one that it was made for. A cache that was pickled
                does not know its model.

        Raises:
            PolicyFileError: a part of the policy has no registered name.
            UnsupportedOperationError: no model is known, or a layer of the library holds what a file cannot.
            InterruptedCacheError: a forward over the cache broke off half way.
        """
        model = self._model() if model is None and self._model is not None else model
        if model is None:
            refuse("save without its model", "it was pickled, or the model is gone; name it: save(path, model)")
        self.check_whole()
        saving.save(path, self.engine, self.library_layers, unwrap(model))

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any) -> "Cache":
        """Read a cache that was saved; it goes on bit for bit where the saved one stood, under the policy in the file.

        Args:
            path: the file.
            model: the model that filled the cache, or one with equal weights; a policy is attached to it.

        Raises:
            CacheFileError: the file is none, or damaged, or of another version, or the cache belongs to another model.
            PolicyFileError: a part of the policy is not installed.
            NotAttachedError: nothing is attached to the model.
        """
        with saving.opened(path) as saved:
            saved.check_model(unwrap(model))
            cache = cls(model, saved.policy)
            saved.fill(cache.engine, cache.library_layers)
        return cache

    def nbytes(self) -> int:
        """Bytes of everything allocated for this cache, the library's own layers included."""
        return self.engine.nbytes + storage_bytes(self.library_layers)

    def report(self) -> Report:
        """Bytes by kind, windows by tier, moves."""
        self.check_whole()
        return make_report(self.engine, storage_bytes(self.library_layers))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_seq_length()} tokens seen, {self.nbytes()} bytes, {self.policy!r})"


def _revive(wiring: Wiring, snapshot: Snapshot, layers: Sequence[Any]) -> Cache:
    """Unpickle a cache."""
    cache, engine = Cache.__new__(Cache), Engine.start(wiring)
    restore(engine, snapshot)
    cache._compose(engine, Turn(None), layers)
    return cache
