"""Presets that keep every token as codes: rows, pieces, bytes, copies, files and the oracle, on tiny models."""

import functools
import tempfile
from importlib.metadata import EntryPoint
from pathlib import Path

import attrs
import pytest
import torch

import qevict
from qevict.config import dumps, files, loads
from qevict.policy import Policy
from qevict.registry import Registry, Switches
from qevict_baselines.kivi import kivi
from qevict_baselines.kvquant import kvquant, nuq
from qevict_baselines.kvquant_calibration import Calibration
from qevict_baselines.oscar import oscar
from qevict_baselines.plain import int2, int3, int4, int8
from qevict_baselines.zipcache import zipcache
from tests.baselines.zoo import EVERY, LENGTHS, NEW, PRESETS, Zoo, model_of, run, steps
from tests.oracle import prompts, replay

FOLDER = tempfile.TemporaryDirectory()
FILE = str(Path(FOLDER.name) / "calibration.safetensors")


def calibrate() -> None:
    """Ranges wide enough for a tiny model, and levels that differ by layer."""
    wide = torch.full((2, 2, 16), 4.0)
    levels = torch.linspace(-1, 1, 8) * torch.tensor([[1.0], [0.8]])
    Calibration(-wide, wide, levels, levels.flip(0).contiguous(), 3, model="tiny").save(FILE)


calibrate()
POLICIES: dict[str, Policy] = {
    "int8": attrs.evolve(int8(), sink_tokens=2, recent_tokens=8),
    "int4": attrs.evolve(int4(), sink_tokens=2, recent_tokens=8),
    "int3": attrs.evolve(int3(), sink_tokens=2, recent_tokens=8),
    "int2": attrs.evolve(int2(), sink_tokens=2, recent_tokens=8),
    "kivi": kivi(group=16, residual_tokens=16),
    "kvquant": kvquant(FILE),
    "nuq": nuq(bits=2),
    "oscar": oscar(group=16, residual_tokens=16),
    "zipcache": attrs.evolve(zipcache(), period_tokens=4),
}
NAMES = tuple(POLICIES)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution is a plugin, whether or not it is installed."""
    registry = Registry([EntryPoint("baselines", "qevict_baselines.plugin", "qevict")], Switches())
    monkeypatch.setattr(files, "default_registry", lambda: registry)


@functools.cache
def batch_of(name: str) -> Zoo:
    return run(POLICIES[name], model_of(), *prompts(*LENGTHS))


@functools.cache
def solo_of(name: str) -> Zoo:
    ids, _ = prompts(*LENGTHS)
    return run(POLICIES[name], model_of(), ids[1:2, -LENGTHS[1] :])


def test_every_preset_is_tested() -> None:
    assert set(POLICIES) == set(EVERY) - set(PRESETS), "give each preset a line in POLICIES"


@pytest.mark.parametrize("name", NAMES)
def test_every_token_is_kept_and_most_are_codes(name: str) -> None:
    batch = batch_of(name)
    report = batch.cache.report()
    assert report.evictions == 0
    for lanes in batch.kept:
        per_row = len(lanes) // len(LENGTHS)
        assert [len(lane) for lane in lanes[::per_row]] == [*LENGTHS]
    coded = sum(report.windows[tier.name] for tier in POLICIES[name].tiers)
    assert coded > report.windows["protected"]


@pytest.mark.parametrize("name", NAMES)
def test_codes_equal_the_patched_oracle(name: str) -> None:
    """Rung 3: a full stock cache, with decoded keys and values put in place."""
    batch = batch_of(name)
    expected = replay(model_of(), batch.sequences, batch.mask, batch.watch, patch=True)[1:]
    for own, theirs in zip(batch.logits, expected, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_a_padded_batch_equals_its_solo_run(name: str) -> None:
    batch, solo = batch_of(name), solo_of(name)
    assert batch.text(1) == solo.text(0)
    for own, alone in zip(batch.logits, solo.logits, strict=True):
        torch.testing.assert_close(own[1:2], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [32])
def test_a_prompt_in_pieces_is_encoded_as_at_once(name: str, chunk: int) -> None:
    """C05: nothing is encoded before the prompt's end, and what is shared is fitted there."""
    ids = prompts(*LENGTHS)[0][1:2, -LENGTHS[1] :]
    pieces, whole = run(POLICIES[name], model_of(), ids, chunk=chunk), solo_of(name)
    assert pieces.cache.report().windows == whole.cache.report().windows
    for own, theirs in zip(pieces.logits, whole.logits, strict=True):
        torch.testing.assert_close(own, theirs, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_told_are_bytes_of_storages_at_every_step(name: str) -> None:
    """What a calibration holds belongs to the policy, and not to any cache."""
    batch, policy = batch_of(name), POLICIES[name]
    calibrations = {
        id(quantizer.calibration): quantizer.calibration
        for tier in policy.tiers
        for quantizer in tier.codec or ()
        if hasattr(quantizer, "calibration")
    }
    arrays = ("key_low", "key_high", "key_levels", "value_levels")
    own = sum(getattr(each, array).nbytes for each in calibrations.values() for array in arrays)
    for report, stored in zip(batch.reported, batch.stored, strict=True):
        assert report.exact_bytes == stored - own


@pytest.mark.parametrize("name", NAMES)
def test_forks_and_files_go_on_where_the_cache_stood(name: str, tmp_path: Path) -> None:
    model, path = model_of(), tmp_path / "cache.safetensors"
    ids = prompts(*LENGTHS)[0][1:2, -LENGTHS[1] :]
    with qevict.attach(model, POLICIES[name]) as session:
        cache = session.prefill(ids)
        found = steps(model, cache.fork())
        cache.save(path)
        loaded = qevict.Cache.load(path, model)
        assert loaded.report() == cache.report()
        again = steps(model, loaded)
    assert again[0] == found[0] == solo_of(name).text(0)
    assert all(map(torch.equal, again[1], found[1]))


@pytest.mark.parametrize("name", NAMES)
def test_files_hold_the_policy(name: str) -> None:
    assert loads(dumps(POLICIES[name])) == POLICIES[name]


def test_zipcache_encodes_anew_what_changes_its_kind() -> None:
    """Every fourth token is an event here; windows move between 4 and 2 bits and are nowhere twice."""
    ids, _ = prompts(110)
    found = run(POLICIES["zipcache"], model_of(), ids, new=4 * NEW)
    report = found.cache.report()
    assert report.promotions > 0
    assert report.demotions > 0
    assert report.bytes_by_kind["ledger copies"] == 0
    for layer in found.cache.engine.layers:
        ranked = int((layer.records.place >= 0).sum())
        salient = int((layer.records.place == 0).sum())
        lanes = layer.lanes
        assert salient == lanes * (ranked // lanes - int(0.4 * (ranked // lanes)))
