"""Each law of rotary tables is broken by some table, and the kit says so; tables of real models keep them."""

from typing import Any

import attrs
import torch
from tests.breaking import Break, breaks, laws_of, report
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from qevict.contracts.rotary import Rotary
from qevict.hf.rotary import read_rotary
from qevict.testing import RotaryContract

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}


def parameters(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **more}}


class OfModel(RotaryContract):
    """Compares with the model's own function."""

    model: PreTrainedModel

    def turned_by_model(self, keys: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.model.model.rotary_emb(keys, positions[:, 0])
        turned: Tensor = apply_rotary_pos_emb(keys, keys, cos, sin)[1]
        return turned


class TestLlama(OfModel):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **parameters("default")))
    part = read_rotary(model)


class TestLlama3(OfModel):
    model = LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            **parameters(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
            ),
        )
    )
    part = read_rotary(model)


class TestQwen3(OfModel):
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **parameters("default")))
    part = read_rotary(model)


class TestYarn(OfModel):
    model = LlamaForCausalLM(
        LlamaConfig(**SIZES, **parameters("yarn", factor=4.0, original_max_position_embeddings=64))
    )
    part = read_rotary(model)


class TestTableByHand(RotaryContract):
    part = Rotary(10_000.0 ** -(torch.arange(4) / 4), amplitude=1.2)


@attrs.frozen
class PlainInverse(Rotary):
    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.rotate(x, -positions)


@attrs.frozen
class Interleaved(Rotary):
    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return Rotary.rotate(self, pairs, positions)


@attrs.frozen
class InTheKeysDtype(Rotary):
    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return Rotary.rotate(self, x, positions.to(x.dtype).long())


@attrs.frozen
class RoundsItself(Rotary):
    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return Rotary.unrotate(self, x, positions).to(x.dtype)


@attrs.frozen
class TurnsInPlace(Rotary):
    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return x.copy_(Rotary.rotate(self, x, positions))


@attrs.frozen
class TurnsAllAlike(Rotary):
    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return Rotary.rotate(self, x, positions - positions.amin(-1, keepdim=True))


@attrs.frozen
class Synchronises(Rotary):
    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return Rotary.rotate(self, x, positions) if positions.max() > 0 else self.amplitude * x


TABLE = (100.0 ** -(torch.arange(4) / 4), 1.2)

BREAKS = (
    Break("test_rotating_is_the_models_own_function", Interleaved(*TABLE), "rotated to"),
    Break("test_unrotating_undoes_rotating", PlainInverse(*TABLE), "a relative error of 0.44"),
    Break("test_work_is_done_in_fp32", InTheKeysDtype(*TABLE), "turn otherwise than in fp32"),
    Break("test_work_is_done_in_fp32", RoundsItself(*TABLE), "came back as torch."),
    Break("test_keys_turn_one_by_one", TurnsInPlace(*TABLE), "it changed its arguments"),
    Break("test_keys_turn_one_by_one", TurnsAllAlike(*TABLE), "turns otherwise alone"),
    Break("test_the_host_never_waits", Synchronises(*TABLE), "_local_scalar_dense"),
)


@breaks(*BREAKS)
def test_a_broken_table_is_told_which_law_it_breaks(broken: Break) -> None:
    report(RotaryContract, broken)


def test_every_law_is_broken_by_some_table() -> None:
    assert {each.law for each in BREAKS} == laws_of(RotaryContract)
