"""What some models do to logits before the softmax."""

import torch
from torch import Tensor

from qevict.contracts.backend import Query


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Cap logits where they lie; to be called before any is hidden, as minus infinity would become finite."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def sink_logits(query: Query) -> Tensor | None:
    """The sink logit of each query, ``[lanes, heads, group, tokens]``, minus infinity for pads; None without any."""
    if query.sink_logits is None:
        return None
    pads = query.positions[:, None, None] < 0
    return torch.where(pads, -torch.inf, query.sink_logits[..., None])
