"""Presets of every kind on models of every kind: head counts, capped logits, sink logits, hybrid layers, 16 bits."""

from typing import Any

import pytest
import torch

import qevict
from tests.baselines.zoo import EVICTING, SAMPLED, Zoo, model_of, policy_of, run
from tests.oracle import impls, prompts, replay, tiny

KINDS = ("defensivekv", "ada_criticalkv", "keydiff", "kvzip", "expected_attention")
"""Shown single queries, output projections, what is held, a reconstruction, and values and rotations, in this order."""

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


@pytest.mark.parametrize("name", SAMPLED)
def test_a_model_of_16_bits(name: str) -> None:
    """Scores stay in fp32; logits are those of the masked model, up to what 16 bits lose."""
    model = tiny(num_hidden_layers=1).to(torch.bfloat16)
    found = run(policy_of(name), model, prompts(70)[0], new=2)
    of_16_bits(found)
    if name in {*EVICTING} - {"streaming_llm"}:
        expected = replay(model, found.sequences, found.mask, found.watch, patch=False)[1:]
        for own, theirs in zip(found.logits, expected, strict=True):
            torch.testing.assert_close(own.float(), theirs.float(), atol=0.05 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize("name", [*KINDS, "streaming_llm", "per_head_qevict"])
def test_16_bits_stored_of_a_model_of_32(name: str) -> None:
    of_16_bits(run(policy_of(name, dtype=torch.bfloat16), model_of(), *prompts(5, 70), new=2))


def of_16_bits(found: Zoo) -> None:
    """What full precision is stored in, and what scores are remembered in."""
    for layer in found.cache.engine.layers:
        assert {array.dtype for array in layer.pools[0].lend().values()} == {torch.bfloat16}
        assert all(column.dtype == torch.float32 for column in layer.records.state.values())
    assert all(logits.isfinite().all() for logits in found.logits)
    assert found.stored == [report.exact_bytes for report in found.reported]


def test_kvzip_reads_with_the_model_that_was_attached() -> None:
    """Its repetition leaves nothing behind: neither tokens seen, nor windows, nor positions."""
    model, (ids, mask) = model_of(), prompts(20, 70)
    with qevict.attach(model, policy_of("kvzip", "90 %")) as session:
        cache = session.prefill(ids, mask)
    assert cache.get_seq_length() == 70
    assert cache.engine.clock.tokens == (20, 70)
    assert max(position for lane in cache.kept_positions(0) for position in lane) == 69
