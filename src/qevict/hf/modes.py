"""What ``session.generate`` cannot honour; each is refused before anything is computed."""

from typing import Any

from qevict.errors import InputError, UnsupportedOperationError
from qevict.hf import compat

_ASSISTED = "assisted decoding takes back tokens that turn out wrong, and what has been evicted cannot come back"
_FROM_THE_HUB = "it runs code from the Hub, and nobody knows what that asks of a cache"
_OWN_CACHE = "the policy decides how keys and values are stored"

_REFUSED = {
    "assistant_model": _ASSISTED,
    "assistant_early_exit": _ASSISTED,
    "prompt_lookup_num_tokens": _ASSISTED,
    "use_mtp": _ASSISTED,
    "penalty_alpha": _FROM_THE_HUB,  # contrastive search
    "dola_layers": _FROM_THE_HUB,
    "constraints": _FROM_THE_HUB,
    "force_words_ids": _FROM_THE_HUB,
    "cache_implementation": _OWN_CACHE,
}
_STALE = ("cache_implementation", "hybrid")
"""What checkpoints of Gemma still name; transformers drops it."""


def wish(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """What generate will make of an option: given, or from the generation config, or from the model's."""
    configs = (kwargs.get("generation_config"), model.generation_config)
    given = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in given if value is not None), None)


def rows_per_prompt(model: Any, kwargs: dict[str, Any]) -> int:
    """Rows that generate makes of one: beams, or sequences to return.

    Raises:
        InputError: more sequences than beams, or several where all would be the same.
    """
    beams, sequences = (wish(model, kwargs, name) or 1 for name in ("num_beams", "num_return_sequences"))
    if sequences > 1 and sequences > beams and (beams > 1 or not wish(model, kwargs, "do_sample")):
        msg = (
            f"num_return_sequences={sequences} needs as many beams (num_beams={beams}), or do_sample=True without beams"
        )
        raise InputError(msg)
    return max(beams, sequences)


def refuse_modes(model: Any, kwargs: dict[str, Any], seen: int) -> None:
    """Check the options of ``session.generate``.

    Args:
        model: what generates.
        kwargs: the options.
        seen: tokens that the cache has seen.

    Raises:
        UnsupportedOperationError: an option that needs another cache, or more of a cache than there is.
    """
    if "past_key_values" in kwargs:
        msg = "session.generate passes the cache itself; give a qevict cache as cache="
        raise UnsupportedOperationError(msg)
    if kwargs.get("use_cache") is False:
        msg = "use_cache=False leaves nothing for a policy to rule; call model.generate instead"
        raise UnsupportedOperationError(msg)
    if seen and wish(model, kwargs, "prefill_chunk_size") and not compat.LATER_CHUNKS:
        msg = "before transformers 5.21 prefill_chunk_size serves new caches only; drop it, or install a newer one"
        raise UnsupportedOperationError(msg)
    if isinstance(kwargs.get("custom_generate"), str):
        _refuse("custom_generate", _FROM_THE_HUB)
    if (wish(model, kwargs, "num_beam_groups") or 1) > 1:
        _refuse("num_beam_groups", _FROM_THE_HUB)
    for name, reason in _REFUSED.items():
        wanted = wish(model, kwargs, name)
        if wanted and (name, wanted) != _STALE:
            _refuse(name, reason)


def _refuse(name: str, reason: str) -> None:
    msg = f"{name} is not supported by session.generate: {reason}; drop {name}"
    raise UnsupportedOperationError(msg)
