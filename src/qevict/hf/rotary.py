"""Builds a rotary table from the model's own module."""

from typing import Any

from qevict.contracts.rotary import Rotary
from qevict.errors import UnsupportedModelError

EXACT_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Tables that stay the same while a model generates, so that an old key can be turned back exactly."""

_BY_LAYER_TYPE = "full_attention"
"""Prefix of the table of the ruled layers, where a model has a table for each type of layer (Gemma-3)."""


def read_rotary(model: Any, why: str = "quantizes") -> Rotary:
    """The table by which the keys of the ruled layers turn, as a copy.

    Args:
        model: the model.
        why: what the policy does that needs it, for the message.

    Raises:
        UnsupportedModelError: the model has no rotary module of the known form, or its table changes on the way.
    """
    module = getattr(model.get_decoder(), "rotary_emb", None)
    prefix = f"{_BY_LAYER_TYPE}_" if hasattr(module, f"{_BY_LAYER_TYPE}_inv_freq") else ""
    frequencies = getattr(module, f"{prefix}inv_freq", None)
    if frequencies is None:
        msg = f"{type(model).__name__} has no rotary module of the known form (decoder.rotary_emb.inv_freq)"
        raise UnsupportedModelError(msg)
    kind = getattr(module, "rope_type", "default")
    kind = kind[_BY_LAYER_TYPE] if isinstance(kind, dict) else kind
    if kind not in EXACT_ROPE_TYPES:
        msg = (
            f"{type(model).__name__} cannot be served by a policy that {why}: RoPE of type {kind!r} changes its "
            f"frequencies with the length of the text, so that stored keys cannot be turned back; exact are: "
            f"{', '.join(sorted(EXACT_ROPE_TYPES))}; policies whose tiers keep full precision, at original positions, "
            f"and whose scorers do not turn keys can be used"
        )
        raise UnsupportedModelError(msg)
    return Rotary(frequencies.detach().float().clone(), float(getattr(module, f"{prefix}attention_scaling", 1.0)))
