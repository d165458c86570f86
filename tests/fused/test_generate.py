"""What the fused backend generates is what the reference backend would: on tiny models, and on a real one."""

from typing import Any

import attrs
import pytest
import torch

import qevict
from qevict import policies
from qevict.backends.reference import ReferenceAttention
from qevict.bench.models import load
from qevict.bench.prompts import load_document
from qevict_baselines.adakv import adakv
from qevict_baselines.compositions import diverse_qevict
from qevict_baselines.kivi import kivi
from qevict_baselines.oscar import oscar
from tests.fused import needs_operator
from tests.oracle import prompts, tiny

pytestmark = needs_operator

POLICIES = {
    "full": policies.full(),
    "evict-only": policies.evict_only("40 %"),
    "QEvict": policies.qevict("40 %"),
    "QEvict by head": attrs.evolve(policies.qevict("60 %"), granularity="kv_head"),
    "four tiers": policies.four_tiers("40 %"),
    "diverse QEvict": diverse_qevict("30 %"),
    "KIVI": kivi(),
    "OScaR": oscar(),
    "AdaKV": adakv("40 %"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_tiny_models_generate_the_same(name: str) -> None:
    """Ragged rows; the backend is chosen by itself."""
    model, policy = tiny("llama", num_hidden_layers=2, head_dim=32), POLICIES[name]
    ids, mask = prompts(150, 90)
    answers = []
    for own in (policy, attrs.evolve(policy, backend=ReferenceAttention())):
        with torch.no_grad(), qevict.attach(model, own) as session:
            cache = session.cache()
            answers.append(
                session.generate(
                    ids, attention_mask=mask, cache=cache, max_new_tokens=40, min_new_tokens=40, do_sample=False
                )
            )
            assert cache.report().backend == ("fused" if own is policy else "reference")
    assert torch.equal(answers[0], answers[1])


@pytest.mark.real
@pytest.mark.parametrize("tokens", [32, pytest.param(256, marks=pytest.mark.exhaustive)])
def test_a_real_model_generates_the_same(tokens: int) -> None:
    model, tokenizer = load()
    policy = policies.qevict("30 %")
    context = torch.tensor([tokenizer(load_document().text)["input_ids"][:300]])
    answers: list[Any] = []
    for own in (policy, attrs.evolve(policy, backend=ReferenceAttention())):
        with torch.no_grad(), qevict.attach(model, own) as session:
            answers.append(session.generate(context, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False))
    assert torch.equal(answers[0], answers[1])
