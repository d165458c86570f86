"""Rungs 1 to 3 of the ladder of exactness, for greedy decoding and sampling, alone and in padded batches."""

from typing import Any

import attrs
import pytest
import torch
from tests.oracle import FAMILIES, Run, assert_sensitive, generate, impls, prompts, replay, tiny
from torch import Tensor

import qevict
from qevict import policies

RULED = [(family, impl) for family in FAMILIES if family != "mistral_sliding" for impl in impls(family)]
WHOLE = [(family, impl) for family, impl in RULED if family in {"llama", "mistral", "qwen2", "qwen3", "phi3"}]
"""All layers are ruled; the case of hybrid layers has its own tests."""

HOW = {"greedy": {"do_sample": False}, "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20}}
EVICTING = {
    "sinks_recent": policies.sinks_recent("35 %"),
    "evict_only": policies.evict_only("40 %"),
    "evict_only_last_32": policies.evict_only("40 %", prompt_queries=32),
    "tokens": policies.evict_only("35 %", window_tokens=1, period_tokens=4),
    "per_head": attrs.evolve(policies.evict_only("40 %"), granularity="kv_head"),
}
QUANTIZING = {
    "qevict": policies.qevict("35 %"),
    "int4": policies.qevict("45 %", bits=4, quantized_share=0.5),
    "int3_w16": policies.qevict("45 %", bits=3, window_tokens=16, period_tokens=4),
    "four_tiers": policies.four_tiers("50 %"),
    "int8_per_head": attrs.evolve(policies.qevict("60 %", bits=8), granularity="kv_head"),
}


def stock(model: Any, ids: Tensor, mask: Tensor | None, new: int, **how: Any) -> Any:
    """The model's own generation."""
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new, return_dict_in_generate=True, output_logits=True, **how
    )


@pytest.mark.parametrize(("family", "impl"), WHOLE)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("rows", [1, 3])
def test_one_dense_tier_is_the_dynamic_cache_bit_for_bit(
    family: str, impl: str, how: dict[str, Any], rows: int
) -> None:
    """Rung 1, unpadded."""
    model = tiny(family, impl=impl)
    ids, _ = prompts(*[120] * rows)
    assert_sensitive(model, ids)
    torch.manual_seed(7)
    expected = stock(model, ids, None, 40, **how)
    torch.manual_seed(7)
    with qevict.attach(model, policies.full()) as session:
        found = session.generate(ids, max_new_tokens=40, return_dict_in_generate=True, output_logits=True, **how)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(own, theirs) for own, theirs in zip(found.logits, expected.logits, strict=True))


@pytest.mark.parametrize(("family", "impl"), RULED)
def test_one_dense_tier_is_the_dynamic_cache_on_padded_batches(family: str, impl: str) -> None:
    """Rung 1, padded: pads are not stored, so the sums run in another order."""
    model = tiny(family, impl=impl)
    ids, mask = prompts(5, 60, 120)
    expected = stock(model, ids, mask, 24, do_sample=False)
    with qevict.attach(model, policies.full()) as session:
        found = session.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=24,
            return_dict_in_generate=True,
            output_logits=True,
            do_sample=False,
        )
    assert torch.equal(found.sequences, expected.sequences)
    for own, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=0)


def check(model: Any, run: Run, mask: Tensor, *, patch: bool) -> None:
    """Every step's logits equal the oracle's, and something was really given up."""
    expected = replay(model, run.sequences, mask, run.watch, patch=patch)
    for own, theirs in zip(run.logits, expected, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)
    if not patch:
        assert any(not layer.keep.all() for layer in run.watch[-1].values())


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("lengths", [(200,), (5, 100, 300)], ids=["solo", "padded"])
def test_eviction_equals_the_masked_full_oracle(
    name: str, impl: str, how: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    """Rung 2, per row and per head."""
    model = tiny("llama", impl=impl)
    ids, mask = prompts(*lengths)
    torch.manual_seed(3)
    check(model, generate(model, EVICTING[name], ids, mask, **how), mask, patch=False)


@pytest.mark.parametrize(("family", "impl"), RULED)
def test_eviction_equals_the_oracle_in_every_family(family: str, impl: str) -> None:
    """Rung 2 over model families."""
    model = tiny(family, impl=impl)
    ids, mask = prompts(40, 150)
    check(model, generate(model, EVICTING["evict_only"], ids, mask), mask, patch=False)


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
@pytest.mark.parametrize("name", QUANTIZING)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("lengths", [(200,), (5, 100, 300)], ids=["solo", "padded"])
def test_quantized_tiers_equal_the_patched_oracle(
    name: str, impl: str, how: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    """Rung 3: the oracle with decoded keys and values put in place."""
    model = tiny("llama", impl=impl)
    ids, mask = prompts(*lengths)
    torch.manual_seed(3)
    run = generate(model, QUANTIZING[name], ids, mask, **how)
    check(model, run, mask, patch=True)
    assert all(run.cache.report().windows[tier.name] for tier in QUANTIZING[name].tiers[1:])


@pytest.mark.parametrize(("family", "impl"), RULED)
def test_quantized_tiers_equal_the_oracle_in_every_family(family: str, impl: str) -> None:
    """Rung 3 over model families."""
    model = tiny(family, impl=impl)
    ids, mask = prompts(40, 150)
    check(model, generate(model, QUANTIZING["qevict"], ids, mask), mask, patch=True)
