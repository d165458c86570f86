"""Every preset: a row of a batch is what it is alone, and a prompt in pieces what it is at once."""

import pytest
import torch
from tests.baselines.zoo import (
    EVICTING,
    LENGTHS,
    NAMES,
    OPTIONS,
    PRESETS,
    TIERED,
    batch_of,
    model_of,
    policy_of,
    run,
    solo_of,
)
from tests.oracle import assert_sensitive, prompts, replay

KEY_ALONE = {"key_norms", "keydiff", "random_eviction", "streaming_llm"}
"""Presets whose scores come from keys or positions alone: of a prompt in pieces nothing differs."""


def test_every_preset_is_tested() -> None:
    assert set(OPTIONS) == set(PRESETS), "give each preset a line in tests/baselines/zoo.py"


def test_the_fixture_depends_on_its_context() -> None:
    ids, _ = prompts(*LENGTHS)
    assert_sensitive(model_of(), ids[2:])


@pytest.mark.parametrize("name", NAMES)
def test_something_is_given_up(name: str) -> None:
    """In the longer rows at the prompt's end, or nothing that follows would show anything."""
    batch, per_row = batch_of(name), batch_of(name).cache.wiring.lanes_per_row
    for row, length in enumerate(LENGTHS[1:], start=1):
        lanes = [lane for layer in batch.kept for lane in layer[row * per_row : (row + 1) * per_row]]
        changed = batch.reported[0].windows.get("int2", 0) > 0
        assert any(len(lane) < length for lane in lanes) or changed, row


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_of_a_padded_batch_equal_their_solo_runs(name: str, length: int) -> None:
    batch, solo, row = batch_of(name), solo_of(name, length), LENGTHS.index(length)
    per_row = batch.cache.wiring.lanes_per_row
    for layer, lanes in enumerate(batch.kept):
        assert lanes[row * per_row : (row + 1) * per_row] == solo.kept[layer]
        assert batch.cache.kept_positions(layer)[row * per_row : (row + 1) * per_row] == solo.cache.kept_positions(layer)
    assert batch.text(row) == solo.text(0)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_pieces_is_compressed_once(name: str) -> None:
    """C05: the kept counts are the same; where scores come from keys alone, so are kept sets and text."""
    ids, _ = prompts(*LENGTHS)
    ids, whole = ids[2:, -130:], solo_of(name, 130)
    for chunk in (64, 50):
        pieces = run(policy_of(name), model_of(), ids, chunk=chunk)
        counts = [[len(lane) for lane in layer] for layer in pieces.kept]
        per_layer = [sum(layer) for layer in counts]
        if name in {"layer_defensivekv", "kvzip"}:
            per_layer = [sum(per_layer)]
            assert per_layer == [sum(len(lane) for layer in whole.kept for lane in layer)]
        else:
            assert per_layer == [sum(len(lane) for lane in layer) for layer in whole.kept]
        assert pieces.reported[0].overshoot_bytes == 0
        assert pieces.kept == whole.kept
        assert pieces.text(0) == whole.text(0)


@pytest.mark.parametrize("name", EVICTING)
def test_eviction_equals_the_masked_full_oracle(name: str) -> None:
    """Rung 2: a full stock cache, masked by layer, KV head and step."""
    if name == "streaming_llm":
        pytest.skip("positions relative to the cache have an oracle of their own")
    batch = batch_of(name)
    expected = replay(model_of(), batch.sequences, batch.mask, batch.watch, patch=False)[1:]
    for own, theirs in zip(batch.logits, expected, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", TIERED)
def test_tiers_equal_the_patched_oracle(name: str) -> None:
    """Rung 3: likewise, with decoded keys and values put in place."""
    batch = batch_of(name)
    expected = replay(model_of(), batch.sequences, batch.mask, batch.watch, patch=True)[1:]
    for own, theirs in zip(batch.logits, expected, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)
