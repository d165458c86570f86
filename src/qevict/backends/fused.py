"""Torch's fused attention operators that tell their log-sum-exp, and plain torch where there is none."""

from typing import Any

import torch
from torch import Tensor

_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_CUDA = "_scaled_dot_product_efficient_attention"


def fused_operator(device: torch.device) -> str | None:
    """Name of the operator that serves a device; None if this build of torch has none for it."""
    name = {"cpu": _CPU, "cuda": _CUDA}.get(device.type)
    return name if name is not None and hasattr(torch.ops.aten, name) else None


def fused_attention(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with a log-sum-exp, never holding a matrix of all queries by all keys where an operator can avoid it.

    Args:
        queries: ``[batch, heads, tokens, head_dim]``, scaled already, of the dtype of the keys.
        keys: ``[batch, heads, keys, head_dim]``, at least one.
        values: likewise.
        hidden: ``[batch, 1, tokens, keys]`` what is not seen.

    Returns:
        Output and natural log-sum-exp ``[batch, heads, tokens]``: 0 and minus infinity for queries that see nothing.
    """
    bias = torch.zeros(hidden.shape, dtype=queries.dtype, device=queries.device).masked_fill_(hidden, -torch.inf)
    operator = fused_operator(queries.device)
    output, lse = _CALLS[operator](queries, keys, values, bias)
    # The operators disagree about queries that see nothing: the one for CPUs calls their log-sum-exp 0.
    blind = hidden.all(-1)
    return output.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -torch.inf)


def _on_cpu(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    operator: Any = getattr(torch.ops.aten, _CPU)
    output, lse = operator(queries, keys, values, attn_mask=bias, scale=1.0)
    return output, lse


def _on_cuda(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    operator: Any = getattr(torch.ops.aten, _CUDA)
    room = -bias.shape[-1] % 16  # rows of the bias must be aligned
    aligned = torch.nn.functional.pad(bias, (0, room))[..., : bias.shape[-1]]
    bias = aligned.expand(-1, queries.shape[1], -1, -1)
    output, lse, *_ = operator(queries, keys, values, bias, compute_log_sumexp=True, scale=1.0)
    return output, lse[..., : queries.shape[2]]


def _plainly(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    logits = queries.float() @ keys.float().transpose(-1, -2) + bias.float()
    return logits.softmax(-1).nan_to_num_(nan=0.0).to(values.dtype) @ values, logits.logsumexp(-1)


_CALLS = {_CPU: _on_cpu, _CUDA: _on_cuda, None: _plainly}
