"""Attach a policy to a model, and take it off again without a trace."""

import operator
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor

from qevict.contracts.values import Need
from qevict.errors import InputError, NothingRuledWarning, UnsupportedModelError, UnsupportedOperationError
from qevict.hf import attention
from qevict.hf.cache import Cache
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.hf.layers import text_config
from qevict.hf.modes import refuse_modes, rows_per_prompt
from qevict.hf.names import name_for
from qevict.hf.reading import check_ids, check_mask, read_into
from qevict.hf.reconstruction import read_and_repeat
from qevict.hf.recording import Recording, record
from qevict.hf.support import wire
from qevict.hf.unwrapping import unwrap
from qevict.policy import Policy

_BATCHING = "init_continuous_batching"
"""The method of a model through which every way into continuous batching leads."""


@attrs.frozen(eq=False)
class Session:
    """A model with a policy attached; what ``with qevict.attach(model, policy) as session`` gives.

    Attributes:
        model: the model as it was given, in whatever it is wrapped.
        policy: the policy of the caches that this session makes.
    """

    model: Any
    policy: Policy

    def cache(self) -> Cache:
        """A new, empty cache under the session's policy."""
        return Cache(self.model, self.policy)

    def prefill(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, chunk_tokens: int | None = None
    ) -> Cache:
        """Read a context into a new cache and compress it, before any question is known.

        Args:
            input_ids: ``[rows, tokens]``.
            attention_mask: ``[rows, tokens]``, 0 for left pads.
            chunk_tokens: read the context in pieces of that many tokens; it stays whole until the last one.

        Returns:
            The filled cache. Ask with ``generate(question_ids, cache=cache.fork())``.

        Raises:
            InputError: the ids are not whole numbers ``[rows, tokens]``, or there are none.
        """
        if chunk_tokens is not None and chunk_tokens < 1:
            msg = f"chunk_tokens is None (all at once) or at least 1, got {chunk_tokens}"
            raise InputError(msg)
        cache = self.cache()
        cache.expect(check_ids(input_ids))
        read = read_and_repeat if Need.RECONSTRUCTION in self.policy.scorer.needs else read_into
        read(cache, unwrap(self.model), input_ids, attention_mask, chunk_tokens)
        return cache

    def record(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Recording:
        """Read a context once, to play it into caches of many policies: ``recording.play_into(cache)``.

        Args:
            input_ids: ``[rows, tokens]``.
            attention_mask: ``[rows, tokens]``, 0 for left pads.

        Raises:
            InputError: the ids are not whole numbers ``[rows, tokens]``, or there are none.
        """
        return record(unwrap(self.model), input_ids, attention_mask)

    def generate(self, input_ids: Tensor | None = None, *, cache: Cache | None = None, **kwargs: Any) -> Any:
        """``model.generate`` under the policy: greedy decoding, sampling, beam search and beam sampling.

        Args:
            input_ids: ``[rows, tokens]``: a prompt, or, with ``cache``, only what is new since the cache was filled
                (what is given is read, so that a context given again is there twice); None with ``inputs_embeds``.
            cache: a cache to go on from, which is changed (fork it to keep it); None for a new one. Each of its rows is
                repeated for the beams, or the sequences to return, as the inputs are. Beams leave it with the last ones
                that ran, which need not be the answers: go on from a fork that was taken before.
            **kwargs: as ``model.generate`` takes them.

        Raises:
            UnsupportedOperationError: assisted decoding, what runs code from the Hub (contrastive search, DoLa, groups
                of beams, constraints), or cache arguments of the caller's own.
            InputError: neither input_ids nor inputs_embeds; embeddings behind a filled cache; a mask that fits neither
                what is new nor all tokens, or with pads that some layer could not honour.
        """
        new = kwargs.get("inputs_embeds") if input_ids is None else input_ids
        if new is None:
            msg = "give input_ids or inputs_embeds"
            raise InputError(msg)
        if input_ids is not None:
            check_ids(input_ids)
        refuse_modes(self.model, kwargs, seen=0 if cache is None else cache.get_seq_length())
        kwargs.pop("use_cache", None)
        cache = self.cache() if cache is None else cache
        if not cache.get_seq_length():
            cache.engine.check_repeated()
            cache.expect(new.shape[1])
            check_mask(kwargs.get("attention_mask"), new.shape[0], (new.shape[1],))
            return self.model.generate(input_ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **kwargs)
        _check_turn(cache, input_ids)
        check_mask(kwargs.get("attention_mask"), new.shape[0], (new.shape[1], cache.get_seq_length() + new.shape[1]))
        if kwargs.get("attention_mask") is None or kwargs["attention_mask"].shape[1] == new.shape[1]:
            kwargs["attention_mask"] = _whole_mask(cache, new, kwargs.get("attention_mask"))
        _check_pads(cache, kwargs["attention_mask"][:, -new.shape[1] :])
        with _repeated(cache, rows_per_prompt(self.model, kwargs)):
            return self.model.generate(input_ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **kwargs)


@contextmanager
def attach(model: Any, policy: Policy) -> Iterator[Session]:
    """Let a policy rule the caches of a model.

    Nothing of the model is changed but the name of its attention implementation, and continuous batching, which is
    refused; both are put back on the way out, also after an exception. The policy rules the caches that the session
    makes, and every ``qevict.Cache``. Caches of other kinds work on as before: a plain ``model.generate`` makes one of
    those, and is not compressed. Attached twice, the model goes back to the outer session when the inner one ends.

    Args:
        model: a transformers causal language model, also compiled or with PEFT adapters of weights around it.
        policy: checked against the model here, before any token.

    Raises:
        UnsupportedModelError: the model cannot be served.
        PolicyError: the policy does not fit the model.

    Warns:
        NothingRuledWarning: all layers have sliding windows.
    """
    inner = unwrap(model)
    if not wire(inner, policy).geometry.layers:
        msg = (
            f"every layer of {type(inner).__name__} has a sliding window and stays the library's own: nothing is ruled"
        )
        warnings.warn(msg, NothingRuledWarning, stacklevel=3)
    if inner.device.type == "meta":
        msg = f"{type(inner).__name__} cannot be served: its weights are not loaded (meta device)"
        raise UnsupportedModelError(msg)
    before, own = _implementations(inner.config), text_config(inner)._attn_implementation
    name = name_for(own)
    if name is None:
        msg = (
            f"attention implementation {own!r} has no stand-in; load the model with "
            f"attn_implementation='sdpa' or 'eager'"
        )
        raise UnsupportedModelError(msg)
    attention.register()
    try:
        inner.set_attn_implementation(name)
        with _without_continuous_batching(inner):
            yield Session(model, policy)
    finally:
        inner.set_attn_implementation(before)


@contextmanager
def _without_continuous_batching(model: Any) -> Iterator[None]:
    """It would store keys and values in pages of its own, past any policy."""
    before = vars(model).get(_BATCHING)
    setattr(model, _BATCHING, _refuse_batching)
    try:
        yield
    finally:
        delattr(model, _BATCHING)
        if before is not None:
            setattr(model, _BATCHING, before)


def _refuse_batching(*_args: object, **_kwargs: object) -> NoReturn:
    msg = "continuous batching stores keys and values past any policy; use it outside of qevict.attach"
    raise UnsupportedOperationError(msg)


def _implementations(config: Any) -> dict[str, Any]:
    """The implementation of a config and of every sub-config, in the form that transformers takes back."""
    own: dict[str, Any] = {"": config._attn_implementation}
    for key in config.sub_configs:
        child = getattr(config, key, None)
        if child is not None:
            own[key] = _implementations(child) if child.sub_configs else child._attn_implementation
    return own


def _check_turn(cache: Cache, input_ids: Tensor | None) -> None:
    if input_ids is None:
        msg = "generate takes embeddings for a whole text, and would skip what the cache has seen of it; give input_ids"
        raise InputError(msg)
    if cache.rows != input_ids.shape[0]:
        msg = f"the cache holds {cache.rows} rows, the inputs have {input_ids.shape[0]}"
        raise InputError(f"{msg}; select or repeat the rows of one of them")


def _check_pads(cache: Cache, new: Tensor) -> None:
    """Pads of a later turn: a turn of one token cannot be one, and a sliding window would count them."""
    if (cache.library_layers or new.shape[1] == 1) and not bool(new.all()):
        msg = (
            "pads in a later turn fill up the windows of sliding layers, and a turn of one token has no room for them; "
            "give rows of unequal turns one by one, each on its own row of the cache (batch_select_indices of a fork)"
        )
        raise InputError(msg)


@contextmanager
def _repeated(cache: Cache, repeats: int) -> Iterator[None]:
    """Each row as often as generate repeats it; taken back if generate refuses before it reads anything."""
    seen, rows = cache.get_seq_length(), cache.rows
    cache.batch_repeat_interleave(repeats)
    try:
        yield
    except Exception:
        if cache.get_seq_length() == seen and cache.rows == rows * repeats:
            cache.batch_select_indices(torch.arange(0, rows * repeats, repeats))
        raise


def _whole_mask(cache: Cache, inputs: Tensor, new: Tensor | None) -> Tensor:
    """The mask over everything seen and the new tokens, from what the cache knows of its left pads."""
    clock, (rows, tokens) = cache.engine.clock, inputs.shape[:2]
    unknown = any(map(operator.lt, clock.unbroken, clock.tokens)) if cache.ruled_layers else True
    if unknown and cache.library_layers:
        msg = (
            "the cache cannot tell where pads lie in layers that the policy does not rule (none is ruled, or pads lie "
            "between turns); give an attention_mask over all tokens, those of the cache and the new ones"
        )
        raise InputError(msg)
    pads = torch.tensor([clock.seen - own for own in clock.tokens], device=inputs.device)[:, None]
    past = (torch.arange(clock.seen, device=inputs.device) >= pads).long()
    return torch.cat((past, torch.ones(rows, tokens).to(past) if new is None else new.to(past)), dim=1)
