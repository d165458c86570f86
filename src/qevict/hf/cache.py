"""The cache that a model's forward fills: transformers' surface over the engine."""

import copy
import itertools
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
from qevict.errors import InputError, NotAttachedError
from qevict.hf import names, saving
from qevict.hf.compat import empty_layer
from qevict.hf.layer import CacheLayer, Turn, refuse
from qevict.hf.reading import check_rows
from qevict.hf.removal import check_removal, crop_layers
from qevict.hf.support import wire
from qevict.policy import Policy


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
        engine = Engine.start(wire(model, policy))
        self._compose(engine, Turn(model.config), [None] * engine.wiring.geometry.layers)
        self._model: weakref.ref[Any] | None = weakref.ref(model)

    def _compose(self, engine: Engine, turn: Turn, layers: Sequence[Any]) -> None:
        """Put owned layers where there is None among the layers of the library."""
        self.engine = engine
        owned = itertools.count()
        super().__init__(layers=[CacheLayer(next(owned), engine, turn) if own is None else own for own in layers])

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cache":
        self.engine.check_whole()
        memo[id(self)] = other = Cache.__new__(Cache)
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        layers = [None if isinstance(layer, CacheLayer) else layer for layer in self.layers]
        return _revive, (self.wiring, take(self.engine), layers)

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
        if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
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
        saving.save(path, self.engine, self.library_layers, model)

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
            saved.check_model(model)
            cache = cls(model, saved.policy)
            saved.fill(cache.engine, cache.library_layers)
        return cache

    def nbytes(self) -> int:
        """Bytes of everything allocated for this cache."""
        return self.engine.nbytes

    def report(self) -> Report:
        """Bytes by kind, windows by tier, moves."""
        return make_report(self.engine)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine.clock.seen} tokens seen, {self.nbytes()} bytes, {self.policy!r})"


def _revive(wiring: Wiring, snapshot: Snapshot, layers: Sequence[Any]) -> Cache:
    """Unpickle a cache."""
    cache, engine = Cache.__new__(Cache), Engine.start(wiring)
    restore(engine, snapshot)
    cache._compose(engine, Turn(None), layers)
    cache._model = None
    return cache
