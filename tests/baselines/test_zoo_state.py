"""Every preset's cache can be copied, saved, turned, recorded, and comes out the same twice."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import Tensor

import qevict
from qevict.config import files
from qevict.errors import UnsupportedOperationError
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.registry import Registry, Switches
from qevict.testing.footprint import reachable_tensors
from tests.baselines.zoo import (
    FIRST,
    LENGTHS,
    NEW,
    SAMPLED,
    batch_of,
    decode,
    kept_of,
    model_of,
    policy_of,
    solo_of,
    steps,
)
from tests.oracle import prompts


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution is a plugin, whether or not it is installed."""
    registry = Registry([EntryPoint("baselines", "qevict_baselines.plugin", "qevict")], Switches())
    monkeypatch.setattr(files, "default_registry", lambda: registry)


def middle() -> tuple[Tensor, Tensor]:
    """The middle row of the batch, alone."""
    ids = prompts(*LENGTHS)[0][1:2, -LENGTHS[1] :]
    return ids, torch.ones_like(ids)


@pytest.mark.parametrize("name", SAMPLED)
def test_forks_and_files_go_on_where_the_cache_stood(name: str, tmp_path: Path) -> None:
    """Bit for bit, as does another run; the original does not change while its fork goes on."""
    model, path = model_of(), tmp_path / "cache.safetensors"
    ids, mask = middle()
    with qevict.attach(model, policy_of(name)) as session:
        cache = session.prefill(ids, mask)
        before = [tensor.clone() for tensor in reachable_tensors(cache)]
        kept, found = kept_of(cache), steps(model, cache.fork())
        for own, theirs in zip(before, reachable_tensors(cache), strict=True):
            assert torch.equal(own, theirs)
        cache.save(path)
        loaded = qevict.Cache.load(path, model)
        assert loaded.report() == cache.report()
        assert kept_of(loaded) == kept == solo_of(name).kept
        again = steps(model, loaded)
    assert again[0] == found[0] == solo_of(name).text(0)
    assert all(map(torch.equal, again[1], found[1]))


@pytest.mark.parametrize("name", SAMPLED)
@torch.no_grad()
def test_rows_turned_in_the_middle_go_on_as_themselves(name: str) -> None:
    model, batch = model_of(), batch_of(name)
    order = torch.tensor([2, 1, 1])
    with qevict.attach(model, policy_of(name)) as session:
        cache, mask = session.prefill(*prompts(*LENGTHS)), batch.mask
        token = torch.full((3, 1), FIRST)
        for step in range(NEW):
            mask = torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), dim=1)
            out = model(
                token, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, **{CACHE_ARGUMENT: cache}
            )
            logits = out.logits[:, -1]
            expected = batch.logits[step] if step < 5 else batch.logits[step][order]
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
            token = batch.logits[step].argmax(-1)[:, None]
            token = token if step < 4 else token[order]
            if step == 4:
                cache.reorder_cache(order)
                mask = mask[order]
    assert cache.kept_positions(1) == picked(batch.cache.kept_positions(1), order.tolist())


def picked(lanes: list[list[int]], rows: list[int]) -> list[list[int]]:
    per_row = len(lanes) // 3
    return [lane for row in rows for lane in lanes[row * per_row : (row + 1) * per_row]]


@pytest.mark.parametrize("name", [each for each in SAMPLED if each.values != ("kvzip",)])
def test_a_recording_is_as_good_as_reading(name: str) -> None:
    model, (ids, mask) = model_of(), prompts(20, LENGTHS[1])
    with qevict.attach(model, policy_of(name)) as session:
        recording = session.record(ids, mask)
        played, read = session.cache(), session.prefill(ids, mask)
        recording.play_into(played)
        assert played.report() == read.report()
        assert kept_of(played) == kept_of(read)
    for ours, theirs in zip(reachable_tensors(played.engine), reachable_tensors(read.engine), strict=True):
        assert torch.equal(ours, theirs)


@torch.no_grad()
def test_kvzip_is_refused_where_nothing_can_be_repeated() -> None:
    """Before anything is stored: the cache can be filled afterwards."""
    model, (ids, mask) = model_of(), middle()
    with qevict.attach(model, policy_of("kvzip")) as session:
        recording, cache = session.record(ids, mask), session.cache()
        with pytest.raises(UnsupportedOperationError, match=r"session\.prefill"):
            recording.play_into(cache)
        with pytest.raises(UnsupportedOperationError, match=r"session\.prefill"):
            session.generate(ids, max_new_tokens=2)
        with pytest.raises(UnsupportedOperationError, match=r"session\.prefill"):
            session.generate(ids, cache=cache, max_new_tokens=2)
        with pytest.raises(UnsupportedOperationError, match=r"session\.prefill"):
            model(ids, **{CACHE_ARGUMENT: cache})
        assert cache.get_seq_length() == 0
        assert cache.rows == 0
        cache.check_whole()
        assert not cache.engine.layers
        found = decode(session, session.prefill(ids, mask), ids, mask)
    assert found.text(0) == solo_of("kvzip").text(0)
