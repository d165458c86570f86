"""What is refused or taken back on models with local layers leaves their caches as they were, or they say so."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.oracle import prompts, tiny

import qevict
from qevict import errors, policies
from qevict.hf.compat import CACHE_ARGUMENT

POLICY = policies.evict_only("40 %", recent_tokens=8)
ASK: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
MODEL = tiny("gemma3")


@torch.no_grad()
def test_a_cache_whose_layers_disagree_says_so_whatever_is_asked(tmp_path: Path) -> None:
    ids, _ = prompts(40)
    with qevict.attach(MODEL, POLICY) as session:
        cache: Any = session.prefill(ids)
        recording = session.record(ids)
        with pytest.raises(errors.InputError, match="count up by one"):
            MODEL(ids[:, :3], position_ids=torch.tensor([[1, 5, 9]]), **{CACHE_ARGUMENT: cache})
        for ask in (
            cache.fork,
            cache.report,
            lambda: pickle.dumps(cache),
            lambda: cache.crop(-1),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.save(tmp_path / "never"),
            lambda: recording.play_into(cache),
            lambda: MODEL(ids[:, :1], **{CACHE_ARGUMENT: cache}),
        ):
            with pytest.raises(errors.InterruptedCacheError, match="reset it"):
                ask()
        cache.reset()
        again = session.generate(ids, cache=cache, **ASK)
        assert torch.equal(again, session.generate(ids, **ASK))


def test_assisted_decoding_is_refused_before_a_local_layer_hears_of_it() -> None:
    with qevict.attach(MODEL, POLICY) as session:
        cache = session.prefill(prompts(40)[0])
        with pytest.raises(errors.UnsupportedOperationError, match="assisted decoding"):
            cache.activate_past_recording()
    assert not any(getattr(layer, "record_past", False) for layer in cache.library_layers)


@pytest.mark.parametrize("rows", [torch.tensor([1, 0], dtype=torch.uint8), torch.tensor([1, 0], dtype=torch.int16)])
def test_rows_named_in_any_whole_number(rows: Any) -> None:
    ids, mask = prompts(40, 40)
    with qevict.attach(MODEL, POLICY) as session:
        cache = session.prefill(ids, mask)
        other = cache.fork()
        other.reorder_cache(rows)
        found = session.generate(ids[[1, 0], :3], cache=other, **ASK)
        expected = session.generate(ids[:, :3], cache=cache, **ASK)
    assert torch.equal(found, expected[[1, 0]])


class TestTurnsThatCannotBeHonoured:
    """Refused before anything is read, and the cache goes on as before."""

    @pytest.mark.parametrize(
        ("family", "how", "reason"),
        [
            ("gemma3", {"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}, "pads in a later turn"),
            ("llama", {"attention_mask": torch.ones(2, 39)}, r"\(2, 3\) or \(2, 43\)"),
            ("llama", {"attention_mask": torch.ones(1, 3)}, r"\(2, 3\) or \(2, 43\)"),
            ("gemma3", {"num_return_sequences": 2}, "do_sample=True"),
            ("gemma3", {"num_beams": 2, "num_return_sequences": 3}, "as many beams"),
            ("llama", {"input_ids": None, "inputs_embeds": torch.zeros(2, 3, 64)}, "embeddings"),
        ],
        ids=["pads", "wide-mask", "mask-of-a-row", "same-answers", "few-beams", "embeddings"],
    )
    def test_by_the_session(self, family: str, how: dict[str, Any], reason: str) -> None:
        model, (ids, mask) = tiny(family), prompts(40, 40)
        with qevict.attach(model, POLICY) as session:
            cache = session.prefill(ids, mask)
            new = {"input_ids": ids[:, :3]} | how
            with pytest.raises(errors.InputError, match=reason):
                session.generate(cache=cache, **ASK, **new)
            assert (cache.rows, cache.get_seq_length()) == (2, 40)

    def test_what_the_library_refuses_leaves_the_rows_as_they_were(self) -> None:
        ids, _ = prompts(40, 40)
        with qevict.attach(MODEL, POLICY) as session:
            cache = session.prefill(ids)
            with pytest.raises(ValueError, match="misspelt"):
                session.generate(ids[:, :3], cache=cache, num_beams=2, misspelt=1, **ASK)
        assert cache.rows == 2

    def test_a_turn_of_one_token_has_no_pad(self) -> None:
        model, (ids, mask) = tiny("llama"), prompts(40, 40)
        with qevict.attach(model, POLICY) as session:
            cache = session.prefill(ids, mask)
            with pytest.raises(errors.InputError, match="one token"):
                session.generate(ids[:, :1], cache=cache, attention_mask=torch.tensor([[1], [0]]), **ASK)

    @pytest.mark.parametrize("mask", [torch.ones(2, 39), torch.ones(40), [[1] * 40] * 2], ids=["short", "flat", "list"])
    @pytest.mark.usefixtures("unchecked")
    def test_masks_of_a_prompt(self, mask: Any) -> None:
        with qevict.attach(MODEL, POLICY) as session, pytest.raises(errors.InputError, match="attention_mask is a"):
            session.prefill(prompts(40, 40)[0], mask)


@pytest.mark.parametrize(
    "other",
    [tiny("llama", num_hidden_layers=1, head_dim=16), tiny("gemma3", sliding_window=8)],
    ids=["llama", "window"],
)
def test_a_recording_of_other_layers(other: Any) -> None:
    ids, _ = prompts(40)
    with qevict.attach(MODEL, POLICY) as session:
        recording = session.record(ids)
    with qevict.attach(other, POLICY) as session, pytest.raises(errors.UnsupportedOperationError, match="of its own"):
        recording.play_into(session.cache())


def test_a_pickled_cache_knows_of_a_cap() -> None:
    model = tiny("gemma2", impl="eager")
    with qevict.attach(model, POLICY) as session:
        cache = session.prefill(prompts(60)[0])
        again = pickle.loads(pickle.dumps(cache))  # noqa: S301 - its own bytes
    assert again.wiring.softcap == cache.wiring.softcap == 0.2
    assert attrs.evolve(again.report(), exact_bytes=0, full_bytes=0, bytes_by_kind={}) == attrs.evolve(
        cache.report(), exact_bytes=0, full_bytes=0, bytes_by_kind={}
    )


Damage = Callable[[dict[str, Any]], None]


def swap(tensors: dict[str, Any]) -> None:
    one, two = "library.0.keys", "library.1.keys"
    tensors[one], tensors[two] = tensors[two], tensors[one]


def flip(tensors: dict[str, Any]) -> None:
    tensors["library.0.values"][0, 0, 3, 5] += 1


def shorten(tensors: dict[str, Any]) -> None:
    for name in ("keys", "values"):
        tensors[f"library.0.{name}"] = tensors[f"library.0.{name}"][:, :, 1:].contiguous()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (swap, "not those that were written"),
        (flip, "not those that were written"),
        (shorten, "wanted twice"),
        (lambda tensors: tensors.pop("library.0.keys"), "no keys and values"),
        (lambda tensors: tensors.update({"library.0.update": torch.ones(1)}), "it holds"),
        (lambda tensors: tensors.update({"library.9.keys": torch.ones(1)}), "too many"),
    ],
    ids=["swapped", "flipped", "shortened", "missing", "injected", "surplus"],
)
def test_local_layers_in_a_damaged_file(damage: Damage, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    with qevict.attach(MODEL, POLICY) as session:
        session.prefill(prompts(60)[0]).save(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        qevict.Cache.load(path, MODEL)
        damage(tensors)
        save_file(tensors, path, metadata)
        with pytest.raises(errors.CacheFileError, match=reason):
            qevict.Cache.load(path, MODEL)
