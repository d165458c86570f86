"""Which models a policy can serve; every refusal names its reason."""

from typing import Any

import torch

from qevict.contracts.values import Geometry, Need
from qevict.engine.wiring import Wiring
from qevict.errors import PolicyError, UnsupportedModelError
from qevict.hf.compat import INSTALLED, OLDEST
from qevict.hf.layers import library_layers, text_config
from qevict.hf.names import name_for
from qevict.hf.output import check_outputs
from qevict.hf.rotary import read_rotary
from qevict.policy import Policy
from qevict.registry import default_registry

FAMILIES = ("gemma2", "gemma3_text", "gpt_oss", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe")
"""``model_type`` of the text configurations whose attention is checked by tests."""

WRAPPERS = ("gemma3", "llava")
"""``model_type`` of models of several modalities that hold one of the families, and are served as they read text."""


def check_model(model: Any) -> None:
    """Refuse what cannot be served.

    Raises:
        UnsupportedModelError: with the reason.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        msg = f"a policy attaches to a transformers model, got {type(model).__name__}"
        raise UnsupportedModelError(msg)
    for reason in (check(model, text_config(model)) for check in _CHECKS):
        if reason:
            msg = f"{type(model).__name__} cannot be served: {reason}"
            raise UnsupportedModelError(msg)


def wire(model: Any, policy: Policy) -> Wiring:
    """Everything that a cache of this model under this policy needs to know.

    Raises:
        UnsupportedModelError: the model cannot be served.
        PolicyError: this is no policy, or a quantizer cannot pack the model's head_dim.
    """
    check_model(model)
    if not isinstance(policy, Policy):
        msg = f"a policy is wanted, got {policy!r}; make one, such as qevict.policies.qevict('20 %'), or load a file"
        raise PolicyError(msg)
    config = text_config(model)
    heads = config.num_attention_heads
    geometry = Geometry(
        layers=library_layers(config).count(None),
        q_heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=policy.dtype or model.dtype,
    )
    why = _turns(policy)
    rotary = read_rotary(model, why) if why and geometry.layers else None
    if Need.OUTPUT_PROJECTION in policy.scorer.needs:
        check_outputs(model)
    device = torch.device("cpu") if model.device.type == "meta" else model.device  # a sketch runs nowhere
    offered = () if policy.backend is not None else default_registry().offered_backends()
    wiring = Wiring(policy, geometry, rotary, device, _softcap(config), offered)
    wiring.check()
    return wiring


def _turns(policy: Policy) -> str | None:
    """What a policy turns keys for; None if it does not."""
    if any(tier.codec is not None for tier in policy.tiers):
        return "quantizes"
    if Need.ROTARY in policy.scorer.needs:
        return f"scores by {policy.scorer.name!r}, which turns keys"
    return "sees kept keys at their places in the cache" if policy.positions == "cache_relative" else None


def _old_library(_model: Any, _config: Any) -> str | None:
    if INSTALLED < OLDEST:
        return f"transformers {INSTALLED} is too old; install transformers>={OLDEST}"
    return None


def _other_cache(model: Any, config: Any) -> str | None:
    """What cannot be honoured whatever the family: its cache holds something else than keys and values by token."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "encoder-decoder models keep a second, cross-attention cache"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) caches one latent vector per token, not the keys and values of heads"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers attend to the keys and values of other layers"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is not causal"
    return None


def _wrong_family(model: Any, config: Any) -> str | None:
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
    outer = model.config.model_type
    if config is not model.config and outer not in WRAPPERS:
        return (
            f"models of type {outer!r} around a text model are not supported; supported: {', '.join(WRAPPERS)}; else "
            "load the text model alone"
        )
    return None


def _odd_layers(_model: Any, config: Any) -> str | None:
    known = {"full_attention", "sliding_attention"}
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - known):
        return f"it has layers of type {', '.join(unknown)}; supported: {', '.join(sorted(known))}"
    return None


def _softcap(config: Any) -> float | None:
    """What the model caps its logits at; None where it does not."""
    softcap: float | None = getattr(config, "attn_logit_softcapping", None)
    return softcap


def _uncapped(_model: Any, config: Any) -> str | None:
    if _softcap(config) is not None and name_for(config._attn_implementation) == name_for("sdpa"):
        wanted = f"attn_logit_softcapping={_softcap(config)}"
        return f"sdpa cannot cap logits as its {wanted} asks; load it with attn_implementation='eager'"
    return None


def _training(model: Any, _config: Any) -> str | None:
    if model.training:
        return "it is in training mode; call model.eval() first"
    return None


def _odd_heads(_model: Any, config: Any) -> str | None:
    if config.num_attention_heads % config.num_key_value_heads:
        return f"{config.num_attention_heads} query heads do not divide by {config.num_key_value_heads} KV heads"
    return None


def _several_devices(model: Any, _config: Any) -> str | None:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return (
            f"its weights lie on several devices ({', '.join(sorted(map(str, devices)))}), which is not supported yet"
        )
    return None


# In this order: what a later check reads of a configuration is there once the family is known.
_CHECKS = (_old_library, _other_cache, _wrong_family, _odd_layers, _uncapped, _training, _odd_heads, _several_devices)
