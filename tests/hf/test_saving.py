"""Caches in files."""

import functools
import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.hf.test_copies import POLICIES, STATES, filled, next_logits, small
from tests.oracle import prompts, tiny
from transformers.cache_utils import DynamicSlidingWindowLayer

import qevict
from qevict import errors, policies
from qevict.hf import saving
from qevict.scorers.cumulative import CumulativeAttention
from qevict.testing.footprint import reachable_bytes

SAVED = POLICIES | {
    "sinks_recent": policies.sinks_recent("40 %"),
    "bf16": attrs.evolve(policies.qevict("40 %"), dtype=torch.bfloat16),
    "last_queries": attrs.evolve(
        policies.evict_only("40 %"), scorer=CumulativeAttention(prompt_queries=32, observe_tokens=2)
    ),
}


def loaded(path: Path, model: Any) -> Any:
    """Read a cache back; which policy is attached does not matter."""
    with qevict.attach(model, policies.full()):
        return qevict.Cache.load(path, model)


def file_of(tmp_path: Path, name: str = "int2") -> Path:
    """A cache that was saved."""
    path = tmp_path / "cache.safetensors"
    path.write_bytes(written(name))
    return path


@functools.cache
def written(name: str) -> bytes:
    """What a filled cache is in a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        filled(small(), SAVED[name], "events").save(path, small())
        return path.read_bytes()


def changed(path: Path, change: Any) -> Path:
    """The same file with other tensors or another header."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        metadata = dict(file.metadata())
    content = json.loads(metadata["content"])
    change(tensors, metadata, content)
    if "content" in metadata:
        metadata["content"] = json.dumps(content)
    save_file(tensors, path, metadata)
    return path


class TestC18SavedCaches:
    """What was saved goes on where it stood, with its own model, or is refused."""

    @pytest.mark.parametrize(
        ("name", "state"),
        [*((name, "events") for name in SAVED), *((name, state) for name in ("full", "int2") for state in STATES[:-1])],
    )
    def test_a_loaded_cache_goes_on_bit_for_bit(self, name: str, state: str, tmp_path: Path) -> None:
        model, path = small(), tmp_path / "cache.safetensors"
        cache = filled(model, SAVED[name], state)
        cache.save(path)
        other = loaded(path, model)
        assert other.policy == cache.policy
        assert other.report() == cache.report()
        assert other.nbytes() == reachable_bytes(other)
        for _ in range(2):
            assert torch.equal(next_logits(model, SAVED[name], other), next_logits(model, SAVED[name], cache))
            assert other.report() == cache.report()
            assert other.kept_positions(1) == cache.kept_positions(1)

    def test_it_can_be_cropped_turned_and_saved_again(self, tmp_path: Path) -> None:
        model, path = small(), file_of(tmp_path, "full")
        cache = loaded(path, model)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-30)
        cache.save(path)
        assert loaded(path, model).report() == cache.report()

    def test_layers_of_the_library_are_kept(self, tmp_path: Path) -> None:
        model, path = small(), tmp_path / "cache.safetensors"
        with qevict.attach(model, policies.full()) as session:
            cache, other = session.prefill(prompts(40)[0]), session.cache()
        theirs, ours = DynamicSlidingWindowLayer(32), DynamicSlidingWindowLayer(32)
        cache.layers.append(theirs)
        other.layers.append(ours)
        new = torch.randn(1, 2, 40, 16)
        theirs.update(new, new)
        cache.save(path)
        with saving.opened(path) as saved:
            saved.fill(other.engine, other.library_layers)
        assert ours.get_seq_length() == theirs.get_seq_length() == 40
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        vars(theirs)["strange"] = {}
        with pytest.raises(errors.UnsupportedOperationError, match="strange"):
            cache.save(tmp_path / "strange.safetensors")
        assert all(torch.equal(*pair) for pair in zip(ours.update(new, new), theirs.update(new, new), strict=True))
        with qevict.attach(model, policies.full()), pytest.raises(errors.CacheFileError, match="layers of the library"):
            qevict.Cache.load(path, model)

    def test_nothing_is_pickled_and_nothing_half_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = file_of(tmp_path)
        whole = path.read_bytes()
        assert [*tmp_path.iterdir()] == [path]
        monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("unpickled"))
        monkeypatch.setattr(pickle, "load", lambda *_: pytest.fail("unpickled"))
        model = small()
        cache = loaded(path, model)

        def full_disk(_tensors: object, temporary: Path, _metadata: object) -> None:
            temporary.write_bytes(b"half")
            raise OSError("no space left")

        monkeypatch.setattr(saving, "save_file", full_disk)
        with pytest.raises(OSError, match="no space"):
            cache.save(path)
        assert path.read_bytes() == whole
        assert [*tmp_path.iterdir()] == [path]

    def test_a_part_without_a_name(self, tmp_path: Path) -> None:
        @attrs.frozen
        class Own(CumulativeAttention):
            name = "own"

        model = small()
        policy = attrs.evolve(policies.evict_only("40 %"), scorer=Own())
        with qevict.attach(model, policy) as session, pytest.raises(errors.PolicyFileError, match="scorer"):
            session.prefill(prompts(60)[0]).save(tmp_path / "cache.safetensors")
        assert not [*tmp_path.iterdir()]

    def test_a_pickled_cache_asks_for_its_model(self, tmp_path: Path) -> None:
        model = small()
        cache = pickle.loads(pickle.dumps(filled(model, SAVED["int2"], "events")))  # noqa: S301 - our own
        with pytest.raises(errors.UnsupportedOperationError, match=r"save\(path, model\)"):
            cache.save(tmp_path / "cache.safetensors")
        cache.save(tmp_path / "cache.safetensors", model)
        assert loaded(tmp_path / "cache.safetensors", model).report() == cache.report()

    @pytest.mark.parametrize(
        ("model", "reason"),
        [
            (tiny(num_hidden_layers=2, seed=1), "weights"),
            (tiny(num_hidden_layers=3), "num_hidden_layers"),
            (tiny("qwen2", num_hidden_layers=2), "class"),
            (small().to(torch.bfloat16), "dtype 'float32'"),
            (tiny(num_hidden_layers=2, rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "rope_parameters"),
        ],
        ids=["weights", "layers", "class", "dtype", "rope"],
    )
    def test_another_model(self, model: Any, reason: str, tmp_path: Path) -> None:
        path = file_of(tmp_path)
        with pytest.raises(errors.CacheFileError, match=reason) as caught:
            loaded(path, model)
        assert str(path) in str(caught.value)

    def test_needs_an_attached_model(self, tmp_path: Path) -> None:
        with pytest.raises(errors.NotAttachedError):
            qevict.Cache.load(file_of(tmp_path), small())

    @pytest.mark.parametrize("damage", ["missing", "empty", "text", "truncated", "header"])
    def test_files_that_are_none(self, damage: str, tmp_path: Path) -> None:
        path = file_of(tmp_path)
        whole = path.read_bytes()
        path.write_bytes(
            {"empty": b"", "text": b"hello" * 9, "truncated": whole[:-1], "header": whole[:50]}.get(damage, b"")
        )
        if damage == "missing":
            path.unlink()
        with pytest.raises(errors.CacheFileError, match=r"cache\.safetensors"):
            loaded(path, small())

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda _t, metadata, _c: metadata.update(format="pt"), "format is 'pt'"),
            (lambda _t, metadata, _c: metadata.clear(), "format is None"),
            (lambda _t, metadata, _c: metadata.update(version="2"), "version '2'.*reads '1'"),
            (lambda _t, metadata, _c: metadata.pop("content"), "damaged"),
            (lambda _t, _m, content: content.pop("model"), "lacks .'model'"),
            (lambda _t, _m, content: content["numbers"].pop("seen"), "damaged.*seen"),
            (lambda _t, _m, content: content["numbers"].update(seen="9"), "damaged.*no count"),
            (lambda _t, _m, content: content["numbers"].update(prompted=1), "neither true nor false"),
            (lambda _t, _m, content: content["numbers"].update(seen=3), "3 tokens seen"),
            (lambda _t, _m, content: content["numbers"].update(since=[1]), "another number of rows"),
            (lambda _t, _m, content: content["numbers"]["layers"].pop(), "1 layers of 2 rows"),
            (lambda _t, _m, content: content["numbers"]["layers"][1]["live"].pop(), "live of layer 1"),
            (lambda _t, _m, content: content["numbers"]["layers"][1]["opened"].pop(), "opened in 1 of 2"),
            (lambda tensors, _m, _c: tensors.pop("layers.1.moves"), "lacks tensors .'layers.1.moves'"),
            (lambda tensors, _m, _c: tensors.update(more=torch.ones(1)), "has .'more'. too many"),
            (lambda tensors, _m, _c: tensors.update({"clock.faults": torch.ones(3) > 0}), "'clock.faults' as"),
            (lambda tensors, _m, _c: tensors.update({"layers.0.place": tensors["layers.0.place"].int()}), "place"),
            (lambda tensors, _m, _c: tensors["layers.1.slots"].fill_(3), "layer 1 lie where they cannot"),
            (lambda tensors, _m, _c: tensors["layers.0.place"].fill_(1), "layer 0 lie where they cannot"),
            (lambda tensors, _m, _c: tensors["layers.0.window"].add_(999), "layer 0 lie where they cannot"),
        ],
        ids=range(20),
    )
    def test_files_that_are_not_as_they_were_written(self, change: Any, reason: str, tmp_path: Path) -> None:
        path = changed(file_of(tmp_path), change)
        with pytest.raises(errors.CacheFileError, match=reason) as caught:
            loaded(path, small())
        assert os.fspath(path) in str(caught.value)

    def test_a_policy_of_which_a_part_is_not_installed(self, tmp_path: Path) -> None:
        def rename(_tensors: Any, _metadata: Any, content: Any) -> None:
            content["policy"] = content["policy"].replace("cumulative", "cumulated")

        path = changed(file_of(tmp_path), rename)
        with pytest.raises(errors.PolicyFileError, match=r"cache\.safetensors.*\n.*cumulated"):
            loaded(path, small())
