"""The attention functions: a policy's own layers go through the engine, everything else to the model's own."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from qevict.engine.forward import Incoming
from qevict.errors import InputError, UnsupportedModelError, UnsupportedOperationError
from qevict.hf.compiling import outside_graphs
from qevict.hf.layer import CacheLayer, layer_of, plain_arithmetic
from qevict.hf.names import BASES
from qevict.hf.output import read_output

_OWN_MASK = "_qevict_mask"
"""Attribute on masks that our mask functions made; a mask without it came from the caller."""


def register() -> None:
    """Make the two names known to transformers; doing it twice changes nothing."""
    masks: dict[str, Callable[..., Tensor | None]] = {"sdpa": sdpa_mask, "eager": eager_mask}
    for name, base in BASES.items():
        AttentionInterface.register(name, partial(attend, base=base))
        AttentionMaskInterface.register(name, partial(_mask, base=masks[base]))


def _mask(*args: Any, base: Callable[..., Tensor | None], **kwargs: Any) -> Tensor | None:
    mask = base(*args, **kwargs)
    if mask is not None:
        setattr(mask, _OWN_MASK, True)
    return mask


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    base: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it; a foreign cache passes through untouched."""
    own = _model_attention(module, base)
    layer = layer_of(key)
    if layer is None:
        return own(module, query, key, value, attention_mask, **kwargs)
    return _through_engine(layer, own, module, query, key, value, attention_mask, kwargs), None


@outside_graphs
def _through_engine(
    layer: CacheLayer,
    own: Callable[..., tuple[Tensor, Tensor | None]],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    layer.turn.end()
    _check_call(module, mask, kwargs)

    device = query.device.type
    autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def native(keys: Tensor, values: Tensor) -> Tensor:
        enabled, dtype = autocast
        with (
            torch.autocast(device, dtype, enabled=enabled),
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
        ):
            return own(module, query, keys, values, mask, **kwargs)[0]

    scaling, seen = kwargs.get("scaling"), _seen_by_last(mask, query.shape[0])
    incoming = Incoming(
        query=query,
        keys=key,
        values=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        native=native,
        valid=None if seen is None else seen[:, -query.shape[2] :],
        visible=None if seen is None else seen.sum(1),
        position_ids=kwargs["position_ids"],
        softcap=kwargs.get("softcap"),
        sink_logits=kwargs.get("s_aux"),
        output=partial(read_output, module, key.shape[1]),
    )
    with plain_arithmetic(device):
        return layer.engine.step(layer.index, incoming)


def _model_attention(module: torch.nn.Module, base: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that the model would have called without us."""
    if base == "sdpa":
        return sdpa_attention_forward
    own: Callable[..., tuple[Tensor, Tensor | None]] = importlib.import_module(
        type(module).__module__
    ).eager_attention_forward
    return own


def _check_call(module: torch.nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuse what only shows when the model runs, before the cache has taken anything in."""
    if module.training:
        msg = "the model is in training mode, and a policy serves inference only; call model.eval() first"
        raise UnsupportedModelError(msg)
    if kwargs.get("use_cache") is False:
        msg = "use_cache=False gives the whole text again at every step, which a cache would hold twice; drop use_cache"
        raise UnsupportedOperationError(msg)
    if kwargs.get("position_ids") is None:
        msg = f"{type(module).__name__} hands no position_ids to attention; this model cannot be served"
        raise InputError(msg)
    if mask is not None and not hasattr(mask, _OWN_MASK):
        msg = "a 4-D attention mask of your own cannot be honoured by a policy; give the 2-D mask of the tokenizer"
        raise InputError(msg)


def _seen_by_last(mask: Tensor | None, rows: int) -> Tensor | None:
    """``[rows, keys]`` which keys, old and new, are real: those that the last query may see."""
    if mask is None:
        return None
    seen = mask[:, 0, -1]
    seen = seen if seen.dtype == torch.bool else seen == 0
    return seen.expand(rows, -1)
