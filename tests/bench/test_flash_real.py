"""The flash backend on a real model: what it generates is what the reference backend would."""

import attrs
import pytest
import torch

import qevict
from qevict import policies
from qevict.backends.flash import FlashAttention
from qevict.backends.reference import ReferenceAttention
from qevict.bench.models import load
from qevict.bench.prompts import load_document
from qevict.policy import Policy

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("policy", "tokens", "tolerance"),
    [(policies.evict_only("30 %"), 256, 1e-3), (policies.qevict("30 %"), 60, 1e-2)],
    ids=["evict-only", "QEvict"],
)
def test_tokens_are_those_of_the_reference(policy: Policy, tokens: int, tolerance: float) -> None:
    """Fed the reference's tokens, its logits are within tolerance at each step, so that only ties could differ.

    With codes, backends drift apart in the long run: where keys differ by rounding, now and then a code of a new window
    is another one, and what follows is computed from it.
    """
    model, tokenizer = load()
    context = torch.tensor([tokenizer(load_document().text)["input_ids"][:300]])
    with torch.no_grad(), qevict.attach(model, attrs.evolve(policy, backend=ReferenceAttention())) as session:
        found = session.generate(
            context, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    new = found.sequences[:, context.shape[1] :]
    with torch.no_grad(), qevict.attach(model, attrs.evolve(policy, backend=FlashAttention())) as session:
        cache = session.cache()
        logits = [model(context, past_key_values=cache).logits[:, -1]]
        logits += [model(token, past_key_values=cache).logits[:, -1] for token in new[:, :-1].split(1, dim=1)]
    for own, theirs, token in zip(logits, found.logits, new[0], strict=True):
        torch.testing.assert_close(own, theirs, rtol=0, atol=tolerance)
        best = theirs.topk(2).values[0]
        assert own.argmax() == token or best[0] - best[1] < 2 * tolerance
