"""Every preset: a row of a batch is what it is alone, and a prompt in pieces what it is at once."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import qevict
from tests.baselines.zoo import (
    EVICTING,
    LENGTHS,
    NAMES,
    OPTIONS,
    PRESETS,
    TIERED,
    Zoo,
    batch_of,
    kept_of,
    model_of,
    policy_of,
    run,
    solo_of,
)
from tests.oracle import assert_sensitive, prompts, replay

ONCE_FOR_ALL = {"key_norms", "keydiff", "random_eviction", "streaming_llm"}
"""Presets whose scores come from keys or positions alone. Others add up over pieces, so that last bits may differ."""
SHARED_BY_LAYERS = {"kvzip", "layer_defensivekv"}


def test_every_preset_is_tested() -> None:
    assert set(OPTIONS) == set(PRESETS), "give each preset a line in tests/baselines/zoo.py"


def test_the_fixture_depends_on_its_context() -> None:
    ids, _ = prompts(*LENGTHS)
    assert_sensitive(model_of(), ids[2:])


@pytest.mark.parametrize("name", NAMES)
def test_the_longer_rows_are_compressed(name: str) -> None:
    """At the prompt's end, or nothing that follows would show anything."""
    batch = batch_of(name)
    for row, length in enumerate(LENGTHS[1:], start=1):
        evicted = any(len(lane) < length for layer in batch.kept for lane in of_row(batch, layer, row))
        assert evicted or name == "diverse_qevict"  # whose codes are so small that all of a short row fit
    if name in TIERED:
        assert batch.reported[0].windows[policy_of(name).tiers[1].name] > 0


def of_row(run: Zoo, layer: list[list[int]], row: int) -> list[list[int]]:
    """The lanes of a row."""
    per_row = run.cache.wiring.lanes_per_row
    return layer[row * per_row : (row + 1) * per_row]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_a_padded_batch_equals_its_solo_run(name: str) -> None:
    """A row of a middle length, which is what shows a fault."""
    batch, solo = batch_of(name), solo_of(name)
    for layer, lanes in enumerate(batch.kept):
        assert of_row(batch, lanes, 1) == solo.kept[layer]
        assert of_row(batch, batch.cache.kept_positions(layer), 1) == solo.cache.kept_positions(layer)
    assert batch.text(1) == solo.text(0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [32, pytest.param(LENGTHS[1] - 1, marks=pytest.mark.slow)])
def test_a_prompt_in_pieces_is_compressed_once(name: str, chunk: int) -> None:
    """C05, also with a last piece of one token, which looks like a step of decoding: equal counts, never too many."""
    whole, pieces = solo_of(name), read_in_pieces(name, chunk)
    assert pieces.report().exact_bytes == whole.reported[0].exact_bytes
    assert pieces.report().overshoot_bytes == whole.reported[0].overshoot_bytes
    kept = kept_of(pieces)
    if name in SHARED_BY_LAYERS:
        assert counted(kept, sum) == counted(whole.kept, sum)
    else:
        assert counted(kept, list) == counted(whole.kept, list)
    if name in ONCE_FOR_ALL:
        assert kept == whole.kept


def counted(kept: list[list[list[int]]], together: Callable[[Iterable[int]], Any]) -> Any:
    """How many tokens each layer holds, or all layers together."""
    return together(sum(map(len, layer)) for layer in kept)


def read_in_pieces(name: str, chunk: int) -> Any:
    with qevict.attach(model_of(), policy_of(name)) as session:
        return session.prefill(prompts(*LENGTHS)[0][1:2, -LENGTHS[1] :], chunk_tokens=chunk)


@pytest.mark.parametrize("name", sorted(ONCE_FOR_ALL))
def test_a_prompt_token_by_token(name: str) -> None:
    """C05: the kept sets and the text are those of the whole prompt, for scores that no other piece can change."""
    ids, _ = prompts(26)
    whole, pieces = (run(policy_of(name, "60 %"), model_of(), ids, new=3, chunk=chunk) for chunk in (None, 1))
    assert pieces.kept == whole.kept
    assert all(len(lane) < 26 for layer in whole.kept for lane in layer)
    assert pieces.text(0) == whole.text(0)


@pytest.mark.parametrize("name", sorted({*EVICTING} - {"streaming_llm"}))
def test_eviction_equals_the_masked_full_oracle(name: str) -> None:
    """Rung 2: a full stock cache, masked by layer, KV head and step."""
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
