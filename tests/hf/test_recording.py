"""A recorded prompt leaves every cache as if the model had read the prompt for it."""

import gc
import weakref
from typing import Any, cast

import attrs
import pytest
import torch
from tests.oracle import prompts, tiny

import qevict
from qevict import policies
from qevict.errors import InputError, InterruptedCacheError, NotAttachedError, UnsupportedOperationError
from qevict.hf.compat import CACHE_ARGUMENT

MODEL = tiny("llama", num_hidden_layers=2)
POLICIES = {
    "full": policies.full(),
    "sinks + recent": policies.sinks_recent("40 %"),
    "evict-only, last queries": policies.evict_only("40 %", prompt_queries=16),
    "qevict": policies.qevict("40 %"),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("lengths", [(150,), (150, 90)])
def test_playing_equals_reading(name: str, lengths: tuple[int, ...]) -> None:
    """Bytes, moves, kept positions and the next logits, bit for bit; also with left padding."""
    ids, mask = prompts(*lengths)
    new = torch.full((len(lengths), 5), 7)
    with qevict.attach(MODEL, POLICIES[name]) as session, torch.no_grad():
        recording = session.record(ids, mask)
        played, read = session.cache(), session.prefill(ids, mask)
        recording.play_into(played)
        assert played.report() == read.report()
        for layer in range(2):
            assert played.kept_positions(layer) == read.kept_positions(layer)
        longer = torch.cat((mask, torch.ones_like(new)), 1)
        positions = longer.cumsum(1)[:, -5:] - 1
        one, other = (
            MODEL(new, attention_mask=longer, position_ids=positions, **{CACHE_ARGUMENT: cache}).logits
            for cache in (played, read)
        )
    assert torch.equal(one, other)


def test_a_recording_serves_many_policies_and_holds_what_it_says() -> None:
    ids, _ = prompts(100)
    with qevict.attach(MODEL, policies.full()) as session:
        recording = session.record(ids)
        first, second = (qevict.Cache(MODEL, POLICIES[name]) for name in ("qevict", "sinks + recent"))
        recording.play_into(first)
        recording.play_into(second)
        assert first.report() == session_report(ids, "qevict")
        assert second.report() == session_report(ids, "sinks + recent")
    heads = MODEL.config.num_attention_heads + 2 * MODEL.config.num_key_value_heads
    head_dim = MODEL.config.hidden_size // MODEL.config.num_attention_heads
    assert recording.nbytes == 2 * 100 * heads * head_dim * 4


def session_report(ids: torch.Tensor, name: str) -> object:
    with qevict.attach(MODEL, POLICIES[name]) as session:
        return session.prefill(ids).report()


def test_only_an_empty_cache_of_that_shape_takes_it() -> None:
    ids, _ = prompts(40)
    other = tiny("llama", num_hidden_layers=3)
    with qevict.attach(MODEL, policies.full()) as session, qevict.attach(other, policies.full()) as foreign:
        recording = session.record(ids)
        with pytest.raises(UnsupportedOperationError, match="empty cache"):
            recording.play_into(session.prefill(ids))
        with pytest.raises(UnsupportedOperationError, match=r"recorded .* \(2, "):
            recording.play_into(foreign.cache())


def test_what_cannot_be_recorded_is_refused() -> None:
    ids, _ = prompts(40)
    with qevict.attach(MODEL, policies.full()) as session, pytest.raises(InputError, match="at least 1 token"):
        session.record(ids[:, :0])
    with pytest.raises(NotAttachedError):
        session.record(ids)


def test_a_recording_is_freed_as_soon_as_it_is_dropped() -> None:
    """It is the largest thing in memory, and cannot wait for the collector of cycles."""
    ids, _ = prompts(40)
    gc.disable()
    try:
        with qevict.attach(MODEL, policies.full()) as session:
            recording = session.record(ids)
            keys = weakref.ref(recording.incoming[0].keys)
            recording.play_into(session.cache())
            del recording
        assert keys() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
@pytest.mark.parametrize("name", POLICIES)
def test_playing_is_the_same_in_every_mode_of_torch(name: str, mode: Any) -> None:
    ids, _ = prompts(150)
    new = torch.full((1, 5), 7)
    with qevict.attach(MODEL, POLICIES[name]) as session:
        recording = session.record(ids)
        plain, moded = session.cache(), session.cache()
        recording.play_into(plain)
        with mode():
            recording.play_into(moded)
        assert moded.report() == plain.report()
        texts = [session.generate(new, cache=each, max_new_tokens=12, do_sample=False) for each in (plain, moded)]
    assert torch.equal(*texts)


def test_a_cache_that_broke_off_says_so() -> None:
    ids, _ = prompts(60)
    with qevict.attach(MODEL, policies.evict_only("50 %")) as session:
        recording, cache, missing = session.record(ids), session.cache(), cast("Any", None)
        broken = attrs.evolve(
            recording, incoming=(recording.incoming[0], attrs.evolve(recording.incoming[1], keys=missing))
        )
        with pytest.raises(Exception, match="NoneType"):
            broken.play_into(cache)
        for ask in (cache.report, cache.fork, lambda: cache.kept_positions(0), lambda: recording.play_into(cache)):
            with pytest.raises(InterruptedCacheError, match="broke off half way"):
                ask()
