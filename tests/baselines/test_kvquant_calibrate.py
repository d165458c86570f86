"""The command that calibrates: what it sees of a model, and what it refuses."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from qevict.errors import InputError, UnsupportedModelError
from qevict.hf.layers import library_layers
from qevict.hf.rotary import read_rotary
from qevict_baselines.kvquant_calibrate import Reading, calibrate, cut, main, observe
from qevict_baselines.kvquant_calibration import Calibration, calibrated, load
from tests.chat import byte_tokenizer
from tests.oracle import FAMILIES, impls, tiny

SMALL = Reading(samples=2, tokens=24, sink_tokens=2)
YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "attention_factor": 1.5}}


def texts(reading: Reading = SMALL, seed: int = 0) -> list[Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return list(torch.randint(3, 97, (reading.samples, reading.tokens), generator=dice))


class Projections:
    """What the modules of a layer give before RoPE, by their names, and the loss's derivatives by it."""

    def __init__(self, model: Any, ids: Tensor, keys: str) -> None:
        self.shown: dict[tuple[int, str], Tensor] = {}
        handles = [
            getattr(layer.self_attn, name).register_forward_hook(self.keep(at, name))
            for at, layer in enumerate(model.get_decoder().layers)
            for name in (keys, "v_proj")
        ]
        model(ids[None], labels=ids[None]).loss.backward()
        for handle in handles:
            handle.remove()

    def keep(self, at: int, name: str) -> Any:
        def hook(_module: object, _given: object, out: Tensor) -> None:
            out.retain_grad()
            self.shown[at, name] = out

        return hook

    def numbers(self, at: int, name: str, like: Tensor) -> Tensor:
        return self.shown[at, name].detach().view_as(like)

    def squares(self, at: int, name: str, like: Tensor) -> Tensor:
        gradient = self.shown[at, name].grad
        assert gradient is not None
        return gradient.square().view_as(like)


@pytest.mark.parametrize(
    ("family", "keys", "sizes"),
    [("llama", "k_proj", {}), ("llama", "k_proj", YARN), ("qwen3", "k_norm", {}), ("mistral", "k_proj", {})],
    ids=["grouped queries", "yarn", "norms of keys", "another family"],
)
def test_it_sees_what_the_projections_give_and_how_much_the_loss_minds(
    family: str, keys: str, sizes: dict[str, Any]
) -> None:
    model, [ids, _] = tiny(family, num_hidden_layers=2, **sizes), texts()
    found = observe(model, read_rotary(model), ids)
    own = Projections(model, ids, keys)
    assert len(found) == 2
    for at, layer in enumerate(found):
        assert layer.keys.shape == (24, 2, model.config.head_dim or 16)
        for name, numbers, weights in (
            (keys, layer.keys, layer.key_weights),
            ("v_proj", layer.values, layer.value_weights),
        ):
            torch.testing.assert_close(numbers, own.numbers(at, name, numbers), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(weights, own.squares(at, name, weights), rtol=1e-3, atol=1e-10)
            assert float(weights.max()) > 0


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"mistral_sliding"}))
def test_it_reads_every_family(family: str) -> None:
    model = tiny(family, impl=impls(family)[0]).requires_grad_(requires_grad=False)
    made = calibrate(model, texts()[:1], SMALL, 2, 0.01)
    ruled = library_layers(model.config).count(None)
    assert made.key_low.shape[:2] == (ruled, 2)
    assert made.key_levels.shape == (ruled, 4)


def test_derivatives_of_the_loss_have_a_say() -> None:
    """With every number as important as any other the levels are others."""
    model, [ids, _] = tiny(num_hidden_layers=1), texts()
    [layer] = observe(model, read_rotary(model), ids)
    even = attrs.evolve(layer, key_weights=torch.ones_like(layer.keys))
    weighed, alike = (calibrated([each], 3, 0.01) for each in (layer, even))
    assert not weighed.key_levels.allclose(alike.key_levels, atol=1e-2)
    assert weighed.value_levels.equal(alike.value_levels)


def made_with(**changes: Any) -> Calibration:
    return calibrate(tiny(num_hidden_layers=1), texts(), attrs.evolve(SMALL, **changes), 2, 0.01)


def test_sinks_have_no_say() -> None:
    model, given = tiny(num_hidden_layers=1), texts()
    changed = [torch.cat((torch.tensor([90, 91]), ids[2:])) for ids in given]
    both = [
        torch.cat([observe(model, read_rotary(model), ids)[0].keys[2:] for ids in each]) for each in (given, changed)
    ]
    made = calibrate(model, given, SMALL, 2, 0.0)
    assert made.key_low[0].equal(both[0].amin(0))
    assert made.key_high[0].equal(both[0].amax(0))
    assert both[0].equal(both[1]), "keys of the only layer depend on their own token alone"


def test_a_bounded_part_is_kept_and_a_seed_says_which() -> None:
    numbers = 2 * 5 * 2 * 16  # five tokens of each of two texts
    one, again, other = (made_with(kept=numbers, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    whole = made_with()
    assert whole == made_with(seed=2), "where everything is kept there is no choice"
    assert bool((one.key_low >= whole.key_low - 1).all())
    model = tiny(num_hidden_layers=1)
    kept = [observe(model, read_rotary(model), ids)[0].keys[2:] for ids in texts()]
    some = calibrate(model, texts(), attrs.evolve(SMALL, kept=numbers), 2, 0.0)
    below = sum((keys < some.key_low[0]).sum(0) for keys in kept)
    assert 0 < float(torch.as_tensor(below).float().mean()) < 22


class Words:
    """A tokenizer of words that are numbers, which may begin a text by itself."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        lead = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return {"input_ids": lead + [int(word) for word in text.split()]}


def test_samples_lie_at_even_distances_and_begin_as_texts_do() -> None:
    two = Reading(samples=3, tokens=4, sink_tokens=0)
    given = ["0 1 2 3 4 5 6", "7 8 9 10 11 12 13 14"]
    assert [ids.tolist() for ids in cut(Words(), given, two)] == [[0, 1, 2, 3], [5, 6, 7, 8], [11, 12, 13, 14]]
    assert [ids.tolist() for ids in cut(Words(99), given, two)] == [[99, 0, 1, 2], [99, 6, 7, 8], [99, 12, 13, 14]]
    assert [ids.tolist() for ids in cut(Words(), ["5 6 7"], Reading(1, 2, 0))] == [[5, 6]]


def test_texts_that_are_too_short_are_refused() -> None:
    with pytest.raises(InputError, match=r"have 7 tokens, and 2 samples of 4 need 8; give more --texts, or fewer"):
        cut(Words(), ["0 1 2 3 4 5 6"], Reading(samples=2, tokens=4, sink_tokens=0))


def test_models_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"call model\.eval"):
        calibrate(tiny().train(), texts(), SMALL, 2, 0.01)
    local = tiny("mistral_sliding")
    with pytest.raises(InputError, match="no layer of MistralForCausalLM keeps every token"):
        calibrate(local, texts(), SMALL, 2, 0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"tokens": 3}, "tokens must be at least 4, got 3"),
        ({"sink_tokens": -1}, "sink_tokens must be at least 0, got -1"),
    ],
)
def test_numbers_that_are_too_small_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        attrs.evolve(SMALL, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a tokenizer of bytes, and a text."""
    where = tmp_path_factory.mktemp("model")
    tiny(num_hidden_layers=1, vocab_size=300, max_position_embeddings=64).save_pretrained(where)
    byte_tokenizer(merges=[]).save_pretrained(where)
    (where / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4, "utf-8")
    return where


def asked(folder: Path, *more: str) -> list[str]:
    return ["--model", str(folder), "--texts", str(folder / "text.txt"), "--samples", "2", "--tokens", "40", *more]


def test_the_command_writes_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made.safetensors"
    assert main(asked(folder, "--bits", "4", "--out", str(out))) == 0
    made = load(out)
    assert (made.bits, made.outliers, made.model, made.samples, made.tokens) == (4, 0.01, str(folder), 2, 40)
    assert made.key_low.shape == (1, 2, 16)
    assert "text 2 of 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--samples", "9"], "the texts have 180 tokens, and 9 samples of 40 need 360"),
        (["--tokens", "65"], "reads at most 64 tokens, got --tokens 65"),
        (["--outliers", "1"], "--outliers is a part of all numbers, from 0 to below 1, got 1.0"),
        (["--texts", "absent.txt"], "cannot read the text absent.txt"),
        (["--model", "{empty}"], "cannot load the model {empty}"),
        (["--out", "absent/made.safetensors"], "there is no folder absent; make it first"),
    ],
)
def test_the_command_says_what_is_wrong(
    folder: Path, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.format(empty=tmp_path) for word in more]
    assert main([*asked(folder, "--out", str(tmp_path / "made.safetensors")), *given]) == 2
    assert message.format(empty=tmp_path) in capsys.readouterr().err
