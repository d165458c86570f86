"""Builds a rotary table from the model's own module."""

from typing import Any

from qevict.contracts.rotary import Rotary
from qevict.errors import UnsupportedModelError

EXACT_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Tables that stay the same while a model generates, so that an old key can be turned back exactly."""


def rope_type(config: Any) -> str:
    """The kind of rotary table that a configuration asks for."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


def read_rotary(model: Any) -> Rotary:
    """The model's rotary table, as a copy.

    Raises:
        UnsupportedModelError: the model has no rotary module of the known form, or its table changes on the way.
    """
    module = getattr(model.base_model, "rotary_emb", None)
    kind = rope_type(model.config)
    if kind not in EXACT_ROPE_TYPES:
        msg = (
            f"RoPE type {kind!r} changes its frequencies while generating, so stored keys cannot be turned back; "
            f"supported: {', '.join(sorted(EXACT_ROPE_TYPES))}"
        )
        raise UnsupportedModelError(msg)
    if module is None or not hasattr(module, "inv_freq"):
        msg = f"{type(model).__name__} has no rotary module of the known form (base_model.rotary_emb.inv_freq)"
        raise UnsupportedModelError(msg)
    return Rotary(module.inv_freq.detach().float().clone(), float(getattr(module, "attention_scaling", 1.0)))
