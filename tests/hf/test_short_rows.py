"""Rows with less than a policy protects, or with nothing yet."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from tests.oracle import prompts, tiny

import qevict
from qevict.hf.compat import CACHE_ARGUMENT

MODEL = tiny("llama", num_hidden_layers=2)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(3, 4), (1, 2, 3)])
def test_rows_shorter_than_the_sinks(lengths: tuple[int, ...]) -> None:
    """Room for sinks that are yet to come is not attended to."""
    ids, mask = prompts(*lengths)
    how: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    stock = MODEL.generate(ids, attention_mask=mask, **how)
    for policy in (qevict.policies.qevict("90 %"), qevict.policies.evict_only("90 %", sink_tokens=8)):
        with qevict.attach(MODEL, policy) as session:
            ours = session.generate(ids, attention_mask=mask, **how)
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(stock.logits), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("pieces", [(3, 1, 12), (3, 3, 1, 9)])
def test_pieces_of_a_prompt_without_a_token_yet(pieces: tuple[int, ...]) -> None:
    """A row that is left of a batch, say; there is nothing to attend to."""
    ids, mask = (torch.cat((torch.zeros(1, 7, dtype=torch.long), own), 1) for own in prompts(9))
    with qevict.attach(MODEL, qevict.policies.qevict("90 %", sink_tokens=2)) as session:
        cache = session.cache()
        cache.expect(16)
        for end, width in zip(accumulate(pieces), pieces, strict=True):
            positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, -width:]
            given = {"attention_mask": mask[:, :end], "position_ids": positions, CACHE_ARGUMENT: cache}
            logits = MODEL(ids[:, end - width : end], **given).logits
        assert cache.kept_positions(0) == [[*range(9)]]
    torch.testing.assert_close(logits[:, -1], MODEL(ids[:, 7:]).logits[:, -1], rtol=1e-4, atol=1e-4)
