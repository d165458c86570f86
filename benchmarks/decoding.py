"""Decoding in whole cycles, for rows of equal or of different length."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qevict.bench.speed import next_tokens

CYCLE_TOKENS = 8
"""The policies' period: a cycle holds one routing event, with all packing that follows from it."""


def decoder(model: Any, cache: Any, lengths: Sequence[int], cycle_tokens: int = CYCLE_TOKENS) -> Callable[[], None]:
    """What decodes one more cycle at every call, greedily.

    Rows of different length come with mask and positions, as ``generate`` gives them; rows of one length without, which
    is the fastest way for every cache.

    Args:
        model: the model.
        cache: filled with that many tokens.
        lengths: true tokens of each row.
        cycle_tokens: tokens of a cycle.
    """
    rows, longest, ragged = len(lengths), max(lengths), len(set(lengths)) > 1
    new = torch.full((rows, 1), 11)
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()

    def cycle() -> None:
        nonlocal new, mask
        for _ in range(cycle_tokens):
            if ragged:
                mask = torch.cat((mask, torch.ones_like(new)), dim=1)
                given = {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
                new = next_tokens(model, cache, new, **given)
            else:
                new = next_tokens(model, cache, new)

    return cycle
