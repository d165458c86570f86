"""Presets of every kind on models of every kind: head counts, capped logits, sink logits, hybrid layers, 16 bits."""

from typing import Any

import pytest
import torch
from tests.baselines.zoo import EVICTING, NAMES, model_of, policy_of, run
from tests.oracle import impls, prompts, replay, tiny

import qevict

KINDS = ("defensivekv", "ada_criticalkv", "keydiff", "kvzip", "expected_attention")
"""Presets that are shown single queries, output projections, what is held, a reconstruction, and values and rotations."""

FAMILIES = ("gemma2", "gpt_oss", "gemma3", "qwen3")


def equals_oracle(name: str, model: Any, **options: Any) -> None:
    """A padded batch, of which something was given up in both rows."""
    found = run(policy_of(name, **options), model, *prompts(45, 80), new=5)
    per_row = found.cache.wiring.lanes_per_row
    for row, length in enumerate((45, 80)):
        assert any(len(lane) < length for layer in found.kept for lane in layer[row * per_row : (row + 1) * per_row])
    expected = replay(model, found.sequences, found.mask, found.watch, patch=False)[1:]
    for own, theirs in zip(found.logits, expected, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("name", KINDS)
def test_one_kv_head_and_as_many_as_query_heads(name: str, kv_heads: int) -> None:
    """Two are what all other tests have."""
    equals_oracle(name, model_of(num_key_value_heads=kv_heads))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", KINDS)
def test_families(family: str, name: str) -> None:
    """Logits that are capped, or share their sum with a sink; layers that no policy rules; normed keys."""
    sizes = {} if family in {"gemma2", "gpt_oss", "gemma3"} else {"num_hidden_layers": 2}
    equals_oracle(name, tiny(family, impl=impls(family)[0], **sizes))


@pytest.mark.parametrize("name", NAMES)
def test_models_and_stored_bits_of_16(name: str) -> None:
    """A bf16 model, and a bf16 cache of an fp32 model."""
    ids, mask = prompts(5, 70)
    for dtype, stored in ((torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        model = tiny(num_hidden_layers=1).to(dtype)
        found = run(policy_of(name, "40 %", dtype=stored), model, ids, mask, new=2)
        for layer in found.cache.engine.layers:
            assert {array.dtype for array in layer.pools[0].lend().values()} == {torch.bfloat16}
            assert all(column.dtype == torch.float32 for column in layer.records.state.values())
        assert all(logits.isfinite().all() for logits in found.logits)
        assert found.stored == [report.exact_bytes for report in found.reported]


@pytest.mark.parametrize("name", sorted({*EVICTING} - {"streaming_llm"}))
def test_a_16_bit_run_equals_the_oracle_of_its_model(name: str) -> None:
    """Up to what 16 bits lose."""
    model = tiny(num_hidden_layers=1).to(torch.bfloat16)
    found = run(policy_of(name), model, prompts(70)[0], new=2)
    expected = replay(model, found.sequences, found.mask, found.watch, patch=False)[1:]
    for own, theirs in zip(found.logits, expected, strict=True):
        torch.testing.assert_close(own.float(), theirs.float(), atol=0.05 * float(theirs.abs().max()), rtol=0)


def test_kvzip_reads_with_the_model_that_was_attached() -> None:
    """Its repetition leaves nothing behind: neither tokens seen, nor windows, nor positions."""
    model, (ids, mask) = model_of(), prompts(20, 70)
    with qevict.attach(model, policy_of("kvzip", "90 %")) as session:
        cache = session.prefill(ids, mask)
    assert cache.get_seq_length() == 70
    assert cache.engine.clock.tokens == (20, 70)
    assert max(position for lane in cache.kept_positions(0) for position in lane) == 69
