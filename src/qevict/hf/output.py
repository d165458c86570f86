"""Reads the output projection of an attention module."""

from typing import Any

import torch

from qevict.contracts.output import OutputProjection
from qevict.errors import UnsupportedModelError

_NAME = "o_proj"
"""What all supported families call it."""


def read_output(module: Any, kv_heads: int) -> OutputProjection:
    """The output projection of one attention layer, without a copy."""
    weight = _linear(module).weight.detach()
    return OutputProjection(weight.T.unflatten(0, (-1, module.head_dim)), kv_heads)


def check_outputs(model: Any) -> None:
    """Find out before any token whether the output projections of a model can be read.

    Raises:
        UnsupportedModelError: some layer's is not a plain linear layer.
    """
    for layer in model.get_decoder().layers:
        _linear(layer.self_attn)


def _linear(module: Any) -> torch.nn.Linear:
    found = getattr(module, _NAME, None)
    if type(found) is not torch.nn.Linear:
        msg = (
            f"{type(module).__name__} has no plain linear layer {_NAME!r} (found {type(found).__name__}), whose "
            f"weights the scorer needs; merge adapters into the weights, load the model without weight "
            f"quantization, or use another scorer"
        )
        raise UnsupportedModelError(msg)
    return found
