"""Reading a prompt into a cache, without computing a single logit."""

from typing import Any

import torch
from torch import Tensor

from qevict.errors import InputError
from qevict.hf.compat import CACHE_ARGUMENT


def check_ids(input_ids: object) -> int:
    """How many tokens each row has.

    Raises:
        InputError: these are no ids, or there are none.
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        given = f"{tuple(input_ids.shape)} {input_ids.dtype}" if isinstance(input_ids, Tensor) else repr(input_ids)
        msg = f"input_ids are whole numbers in a tensor [rows, tokens], got {given}; use return_tensors='pt'"
        raise InputError(msg)
    if input_ids.numel() == 0:
        msg = f"a prompt has at least 1 token, got input_ids of shape {tuple(input_ids.shape)}"
        raise InputError(msg)
    return input_ids.shape[1]


def check_mask(mask: object, rows: int, widths: tuple[int, ...]) -> None:
    """Hold a mask of pads to its form.

    Raises:
        InputError: it is no tensor ``[rows, tokens]`` of one of these widths.
    """
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != rows or mask.shape[1] not in widths:
        given = f"{tuple(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else repr(mask)
        wanted = " or ".join(str((rows, width)) for width in widths)
        msg = f"attention_mask is a tensor {wanted}, 1 for tokens and 0 for pads on the left; got {given}"
        raise InputError(msg)


def check_rows(rows: object, held: int) -> list[int]:
    """Indices of rows, on the host.

    Args:
        rows: what was given.
        held: rows that there are.

    Raises:
        InputError: these are no whole numbers ``[rows]``, none at all, or some row is not there.
    """
    if not isinstance(rows, Tensor) or rows.ndim != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
        given = f"{tuple(rows.shape)} {rows.dtype}" if isinstance(rows, Tensor) else repr(rows)
        msg = f"rows are named by whole numbers in a tensor [rows], got {given}"
        raise InputError(msg)
    named: list[int] = rows.tolist()
    if not named or min(named) < 0 or max(named) >= held:
        msg = f"the cache holds rows 0 ... {held - 1}, of which at least one must stay; got {named}"
        raise InputError(msg)
    return named


@torch.no_grad()
def read_into(
    cache: Any, model: Any, input_ids: Tensor, attention_mask: Tensor | None, chunk_tokens: int | None = None
) -> None:
    """Run a prompt through the model's layers; its keys and values go into the cache.

    Args:
        cache: an empty cache.
        model: what reads.
        input_ids: ``[rows, tokens]``.
        attention_mask: ``[rows, tokens]``, 0 for left pads; None if there are none.
        chunk_tokens: tokens of one forward; None for all.
    """
    tokens = check_ids(input_ids)
    check_mask(attention_mask, input_ids.shape[0], (tokens,))
    step = chunk_tokens or tokens
    attention_mask = None if attention_mask is None else attention_mask.long()
    positions = None if attention_mask is None else (attention_mask.cumsum(1) - 1).clamp(min=0)
    for start in range(0, tokens, step):
        until = min(start + step, tokens)
        model.base_model(
            input_ids[:, start:until],
            attention_mask=None if attention_mask is None else attention_mask[:, :until],
            position_ids=None if positions is None else positions[:, start:until],
            use_cache=True,
            **{CACHE_ARGUMENT: cache},
        )
