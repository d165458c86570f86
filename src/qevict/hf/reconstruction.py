"""Reading a prompt, and repeating it behind itself, for scorers that ask what a reconstruction of it needs."""

import copy
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from qevict.contracts.scorer import Repeats
from qevict.engine.reconstruction import Repetition
from qevict.errors import InputError
from qevict.hf.cache import Cache
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.hf.layer import CacheLayer, Turn, with_owned
from qevict.hf.layers import text_config
from qevict.hf.reading import read_into


@attrs.frozen(eq=False)
class _Piece:
    """One forward of the repetition.

    Attributes:
        ids: ``[rows, tokens]`` with pads on the left.
        real: likewise, 0 for pads.
        starts: by row, true position of the first repeated token.
        ends: likewise behind the last.
    """

    ids: Tensor
    real: Tensor
    starts: list[int]
    ends: list[int]


@torch.no_grad()
def read_and_repeat(
    cache: Cache, model: Any, input_ids: Tensor, attention_mask: Tensor | None, chunk_tokens: int | None
) -> None:
    """Read a prompt into an empty cache, show its scorer a repetition of it, and only then end it.

    Source: KVzip (arXiv 2505.23416).
    """
    repeats = cache.policy.scorer.repeats or Repeats()
    _check(repeats, text_config(model).vocab_size, attention_mask)
    cache.engine.clock.hold()
    read_into(cache, model, input_ids, attention_mask, chunk_tokens)
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
    for piece in _pieces(input_ids, cache.engine.clock.tokens, repeats):
        _read(cache, model, piece, real)
    cache.engine.end_prompt()


def _check(repeats: Repeats, vocabulary: int, attention_mask: Tensor | None) -> None:
    """Find out before the first token.

    Raises:
        InputError: the instruction is not in the model's vocabulary, or a row has no token to repeat.
    """
    if repeats.instruction and max(repeats.instruction) >= vocabulary:
        msg = (
            f"the instruction before a repetition holds token id {max(repeats.instruction)}, the model knows "
            f"{vocabulary} of them; make it with the model's own tokenizer"
        )
        raise InputError(msg)
    if attention_mask is not None and not bool(attention_mask.any(dim=1).all()):
        msg = "a row has no real token: its attention mask is 0 throughout; drop the row"
        raise InputError(msg)


def _pieces(input_ids: Tensor, tokens: tuple[int, ...], repeats: Repeats) -> Iterator[_Piece]:
    """Each row's own tokens in pieces; a row that has fewer pieces than another repeats its last one again."""
    counts = [-(-own // repeats.tokens) for own in tokens]
    texts = [row[len(row) - own :] for row, own in zip(input_ids, tokens, strict=True)]
    instruction = torch.tensor(repeats.instruction, dtype=input_ids.dtype, device=input_ids.device)
    for number in range(max(counts)):
        starts = [min(number, count - 1) * repeats.tokens for count in counts]
        ends = [min(start + repeats.tokens, own) for start, own in zip(starts, tokens, strict=True)]
        rows = [
            torch.cat((instruction, text[max(0, start - repeats.lead_tokens) : end]))
            for text, start, end in zip(texts, starts, ends, strict=True)
        ]
        width = max(map(len, rows))
        ids = torch.stack([torch.cat((row[:1].expand(width - len(row)), row)) for row in rows])
        real = torch.stack([torch.arange(width, device=ids.device) >= width - len(row) for row in rows])
        yield _Piece(ids, real.long(), starts, ends)


def _read(cache: Cache, model: Any, piece: _Piece, real: Tensor) -> None:
    """One forward over copies of what no policy rules; the ruled layers take nothing in."""
    repetition, config = Repetition(cache.engine, piece.starts, piece.ends), text_config(model)
    layers = [None if isinstance(layer, CacheLayer) else copy.deepcopy(layer) for layer in cache.layers]
    mask = torch.cat((real, piece.real), dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, real.shape[1] :]
    model.base_model(
        piece.ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        **{CACHE_ARGUMENT: TransformersCache(layers=with_owned(layers, repetition, Turn(config)))},
    )
