"""Which model a cache belongs to, in a few words that can be written down."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from qevict.hf.layers import text_config

_SIZES = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "layer_types", "sliding_window", "rope_parameters", "rms_norm_eps", "hidden_act",
    "hidden_activation", "attn_logit_softcapping", "query_pre_attn_scalar", "num_experts_per_tok",
)  # fmt: skip
"""Entries of a config that are named in a refusal; what else differs shows in the weights."""

_SAMPLED = 32
"""Numbers of each parameter that are looked at, at least, if it has as many."""


def identity(model: Any) -> dict[str, Any]:
    """A model's class, dtype, sizes and adapters, and a digest of a sample of each of its weights.

    The sample is small for large models too. It tells apart checkpoints, not models with single weights edited.
    """
    config = text_config(model)
    sizes = {name: getattr(config, name, None) for name in _SIZES}
    return {
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        **{name: value for name, value in sizes.items() if value is not None},
        "adapters": _adapters(model),
        "weights": _digest(model),
    }


def _adapters(model: Any) -> list[str]:
    """Adapters of weights that are switched on."""
    active = (
        getattr(own, "active_adapters", ()) for own in model.modules() if not getattr(own, "disable_adapters", False)
    )
    return sorted({name for names in active if isinstance(names, list) for name in names})


@torch.no_grad()
def _digest(model: Any) -> str:
    """Of names, shapes and every n-th number of all parameters; asks the device once."""
    digest, samples = hashlib.sha256(), []
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        samples.append(_sample(parameter.detach()))
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.flatten()
    return flat[:: max(1, flat.shape[0] // _SAMPLED)].float()
