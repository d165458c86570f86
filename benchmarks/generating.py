"""Reading a prompt and the first token of the reply."""

from typing import Any

import torch
from torch import Tensor

from qevict.bench.speed import next_tokens


def tokens_of(model: Any, rows: int, tokens: int) -> Tensor:
    """A prompt of random ids: which words they are does not matter to time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, model.config.vocab_size, (rows, tokens), generator=generator)


def read(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """From an empty cache to the first token; compression included."""
    return next_tokens(model, cache, ids)
