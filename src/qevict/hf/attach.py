"""Attach a policy to a model, and take it off again without a trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from qevict.errors import InputError, UnsupportedModelError, UnsupportedOperationError
from qevict.hf import attention
from qevict.hf.cache import Cache
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.hf.names import name_for
from qevict.hf.reading import check_ids, read_into
from qevict.hf.recording import Recording, record
from qevict.hf.support import wire
from qevict.policy import Policy


@attrs.frozen(eq=False)
class Session:
    """A model with a policy attached; what ``with qevict.attach(model, policy) as session`` gives.

    Attributes:
        model: the model.
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
        read_into(cache, self.model, input_ids, attention_mask, chunk_tokens)
        return cache

    def record(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Recording:
        """Read a context once, to play it into caches of many policies: ``recording.play_into(cache)``.

        Args:
            input_ids: ``[rows, tokens]``.
            attention_mask: ``[rows, tokens]``, 0 for left pads.

        Raises:
            InputError: the ids are not whole numbers ``[rows, tokens]``, or there are none.
        """
        return record(self.model, input_ids, attention_mask)

    def generate(self, input_ids: Tensor | None = None, *, cache: Cache | None = None, **kwargs: Any) -> Any:
        """``model.generate`` under the policy: greedy decoding, sampling, beam search and beam sampling.

        Args:
            input_ids: ``[rows, tokens]``: a prompt, or, with ``cache``, only what is new since the cache was filled
                (what is given is read, so that a context given again is there twice); None with ``inputs_embeds``.
            cache: a cache to go on from, which is changed (fork it to keep it); None for a new one. Each of its rows is
                repeated for the beams, or the sequences to return, as the inputs are.
            **kwargs: as ``model.generate`` takes them.

        Raises:
            UnsupportedOperationError: assisted decoding, or a caller's own cache arguments.
            InputError: neither input_ids nor inputs_embeds.
        """
        new = kwargs.get("inputs_embeds") if input_ids is None else input_ids
        if new is None:
            msg = "give input_ids or inputs_embeds"
            raise InputError(msg)
        if input_ids is not None:
            check_ids(input_ids)
        _refuse_modes(self.model, kwargs)
        cache = self.cache() if cache is None else cache
        if not cache.engine.clock.seen:
            cache.expect(new.shape[1])
        else:
            _check_batch(cache, new)
            if kwargs.get("attention_mask") is None or kwargs["attention_mask"].shape[1] == new.shape[1]:
                kwargs["attention_mask"] = _whole_mask(cache, new, kwargs.get("attention_mask"))
            beams = (_wish(self.model, kwargs, name) or 1 for name in ("num_beams", "num_return_sequences"))
            cache.batch_repeat_interleave(max(beams))
        return self.model.generate(input_ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **kwargs)


@contextmanager
def attach(model: Any, policy: Policy) -> Iterator[Session]:
    """Let a policy rule the caches of a model.

    Nothing of the model is changed but the name of its attention implementation, which is put back on the way out, also
    after an exception. The policy rules the caches that the session makes, and every ``qevict.Cache``. Caches of other
    kinds work on as before: a plain ``model.generate`` makes one of those, and is not compressed. Attached twice, the
    model goes back to the outer session when the inner one ends.

    Args:
        model: a transformers causal language model.
        policy: checked against the model here, before any token.

    Raises:
        UnsupportedModelError: the model cannot be served.
        PolicyError: the policy does not fit the model.
    """
    wire(model, policy)
    if model.device.type == "meta":
        msg = f"{type(model).__name__} cannot be served: its weights are not loaded (meta device)"
        raise UnsupportedModelError(msg)
    before = _implementations(model.config)
    name = name_for(model.config._attn_implementation)
    if name is None:
        msg = (
            f"attention implementation {model.config._attn_implementation!r} has no stand-in; load the model with "
            f"attn_implementation='sdpa' or 'eager'"
        )
        raise UnsupportedModelError(msg)
    attention.register()
    try:
        model.set_attn_implementation(name)
        yield Session(model, policy)
    finally:
        model.set_attn_implementation(before)


def _implementations(config: Any) -> dict[str, Any]:
    """The implementation of a config and of every sub-config, in the form that transformers takes back."""
    own: dict[str, Any] = {"": config._attn_implementation}
    for key in config.sub_configs:
        child = getattr(config, key, None)
        if child is not None:
            own[key] = _implementations(child) if child.sub_configs else child._attn_implementation
    return own


def _wish(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """What generate will make of an option: given, or from the generation config, or from the model's."""
    configs = (kwargs.get("generation_config"), model.generation_config)
    given = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in given if value is not None), None)


def _refuse_modes(model: Any, kwargs: dict[str, Any]) -> None:
    if "past_key_values" in kwargs:
        msg = "session.generate passes the cache itself; give a qevict cache as cache="
        raise UnsupportedOperationError(msg)
    if _wish(model, kwargs, "assistant_model") is not None or _wish(model, kwargs, "prompt_lookup_num_tokens"):
        msg = (
            "assisted and prompt-lookup decoding are not supported by a qevict cache yet; drop assistant_model and "
            "prompt_lookup_num_tokens"
        )
        raise UnsupportedOperationError(msg)
    if kwargs.get("use_cache") is False:
        msg = "use_cache=False leaves nothing for a policy to rule; call model.generate instead"
        raise UnsupportedOperationError(msg)
    kwargs.pop("use_cache", None)


def _check_batch(cache: Cache, inputs: Tensor) -> None:
    held, rows = len(cache.engine.clock.tokens), inputs.shape[0]
    if held != rows:
        msg = f"the cache holds {held} rows, the inputs have {rows}; select or repeat the rows of one of them"
        raise InputError(msg)


def _whole_mask(cache: Cache, inputs: Tensor, new: Tensor | None) -> Tensor:
    """The mask over everything seen and the new tokens, from what the cache knows of its left pads."""
    clock, (rows, tokens) = cache.engine.clock, inputs.shape[:2]
    pads = torch.tensor([clock.seen - own for own in clock.tokens], device=inputs.device)[:, None]
    past = (torch.arange(clock.seen, device=inputs.device) >= pads).long()
    return torch.cat((past, torch.ones(rows, tokens).to(past) if new is None else new.to(past)), dim=1)
