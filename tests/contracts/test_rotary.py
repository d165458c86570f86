"""RoPE as a value that can be undone, against the model's own function."""

from typing import Any

import pytest
import torch
from tests.oracle import tiny
from tests.ropes import EXACT, changing
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.phi3 import modeling_phi3 as phi3

from qevict.contracts.rotary import Rotary
from qevict.errors import UnsupportedModelError
from qevict.hf.rotary import read_rotary

HEAD_DIM = 32


def llama(rope_type: str, parameters: dict[str, Any]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=2 * HEAD_DIM,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": rope_type, "rope_theta": 10_000.0, **parameters},
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


MODELS = {name: llama(name, parameters) for name, parameters in EXACT.items()}


@pytest.fixture(params=EXACT)
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    return MODELS[request.param]


def keys_at_random(tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(2, 3, tokens, HEAD_DIM, generator=generator).to(dtype)


def turned_by_model(model: LlamaForCausalLM, keys: Tensor, positions: Tensor) -> Tensor:
    """The key that the model itself would give to its cache; ``positions`` is ``[rows, tokens]``."""
    cos, sin = model.model.rotary_emb(keys, positions)
    turned: Tensor = apply_rotary_pos_emb(keys, keys, cos, sin)[1]
    return turned


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def test_rotate_is_the_models_own_function_bit_for_bit(model: LlamaForCausalLM) -> None:
    """Positions of several hundred, gaps and a different offset in each row included."""
    keys = keys_at_random(40)
    positions = torch.stack((torch.arange(0, 800, 20), torch.arange(40) + 611))
    rotated = read_rotary(model).rotate(keys, positions[:, None])
    assert torch.equal(rotated, turned_by_model(model, keys, positions))


def test_unrotate_undoes_the_models_own_function(model: LlamaForCausalLM) -> None:
    keys, positions = keys_at_random(400), torch.arange(400).expand(2, 400)
    back = read_rotary(model).unrotate(turned_by_model(model, keys, positions), positions[:, None])
    assert relative_error(back, keys) <= 1e-6
    # Token by token as well, so that a few wrong positions cannot hide in the sum.
    worst = (back - keys).norm(dim=-1) / keys.norm(dim=-1)
    assert float(worst.max()) <= 2e-6


def test_a_key_moved_by_more_than_a_hundred_is_the_key_turned_there(model: LlamaForCausalLM) -> None:
    rotary, keys = read_rotary(model), keys_at_random(30)
    here, there = torch.arange(30) + 5, torch.arange(30) + 517
    moved = rotary.rotate(rotary.unrotate(turned_by_model(model, keys, here.expand(2, 30)), here), there)
    torch.testing.assert_close(moved, turned_by_model(model, keys, there.expand(2, 30)), rtol=1e-5, atol=1e-5)
    back = rotary.rotate(rotary.unrotate(moved, there), here)
    torch.testing.assert_close(back, turned_by_model(model, keys, here.expand(2, 30)), rtol=1e-5, atol=1e-5)
    # Turning keeps the length of a key (up to the table's amplitude, the same at every position).
    torch.testing.assert_close(moved.norm(dim=-1), keys.norm(dim=-1) * rotary.amplitude, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_key_comes_back_within_one_rounding(model: LlamaForCausalLM, dtype: torch.dtype) -> None:
    """One rounding of each channel shifts a pair of channels by at most half a unit in its last place."""
    rotary, keys, positions = read_rotary(model), keys_at_random(300, torch.float32), torch.arange(300) + 200
    stored = rotary.rotate(keys, positions).to(dtype)
    back = rotary.unrotate(stored, positions)
    assert back.dtype == torch.float32
    by_pair = [vectors.unflatten(-1, (2, HEAD_DIM // 2)).norm(dim=-2) for vectors in (back - keys, keys)]
    unit = torch.finfo(dtype).eps / 2
    tiny = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert bool((by_pair[0] <= unit * by_pair[1] * 1.001 + 2 * tiny + 1e-6).all())


def test_positions_of_a_16_bit_key_are_not_rounded(model: LlamaForCausalLM) -> None:
    """Integers above 256 do not exist in bf16; tables are made in fp32 whatever the key's dtype."""
    rotary, keys = read_rotary(model), keys_at_random(8, torch.bfloat16)
    positions = torch.arange(8) + 4093
    assert torch.equal(rotary.rotate(keys, positions), rotary.rotate(keys.float(), positions))
    assert not torch.equal(rotary.rotate(keys, positions), rotary.rotate(keys, positions + 1))


def test_under_yarn_the_plain_inverse_would_be_wrong() -> None:
    """The gate of the round-trip test: turning back with ``-sin`` misses by the square of the amplitude."""
    rotary, keys, positions = read_rotary(MODELS["yarn"]), keys_at_random(20), torch.arange(20) + 300
    assert rotary.amplitude > 1.1
    plain = rotary.rotate(rotary.rotate(keys, positions), -positions)
    assert relative_error(plain, keys) > 0.2
    assert relative_error(rotary.unrotate(rotary.rotate(keys, positions), positions), keys) <= 1e-6


def test_the_tables_differ() -> None:
    """The gate of the comparisons: no kind of table may pass for another at these positions."""
    keys, positions = keys_at_random(20), torch.arange(20) + 300
    turned = [read_rotary(model).rotate(keys, positions) for model in MODELS.values()]
    for index, left in enumerate(turned):
        for right in turned[:index]:
            assert relative_error(left, right) > 0.1


def test_amplitude_is_one_except_under_yarn() -> None:
    assert {name: read_rotary(model).amplitude == 1 for name, model in MODELS.items()} == {
        "default": True,
        "linear": True,
        "llama3": True,
        "yarn": False,
    }


def test_a_table_is_a_copy_that_outlives_changes_of_the_model() -> None:
    model = llama("default", {})
    rotary = read_rotary(model)
    before = rotary.inverse_frequencies.clone()
    model.model.rotary_emb.inv_freq.mul_(2)
    assert torch.equal(rotary.inverse_frequencies, before)
    assert rotary.rotary_dim == HEAD_DIM


def test_position_zero_leaves_a_key_as_it_is_up_to_the_amplitude(model: LlamaForCausalLM) -> None:
    rotary, keys = read_rotary(model), keys_at_random(4)
    assert torch.equal(rotary.rotate(keys, torch.zeros(4, dtype=torch.int64)), keys * rotary.amplitude)


@pytest.mark.parametrize(("rope_type", "parameters"), changing(HEAD_DIM).items(), ids=changing(HEAD_DIM))
def test_tables_that_change_while_generating_are_refused(rope_type: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{rope_type}.*exact are: default, linear, llama3, yarn"):
        read_rotary(llama(rope_type, parameters))


def test_partial_rope_turns_the_first_channels_as_the_model_does() -> None:
    model, keys = tiny("phi3_partial", head_dim=HEAD_DIM), keys_at_random(200)
    rotary, positions = read_rotary(model), torch.arange(200) + 150
    cos, sin = model.model.rotary_emb(keys, positions[None])
    turned = rotary.rotate(keys, positions)
    assert rotary.rotary_dim == HEAD_DIM // 2
    assert torch.equal(turned, phi3.apply_rotary_pos_emb(keys, keys, cos, sin)[1])
    assert torch.equal(turned[..., HEAD_DIM // 2 :], keys[..., HEAD_DIM // 2 :])
    torch.testing.assert_close(rotary.unrotate(turned, positions), keys, atol=5e-6, rtol=0)


def test_a_model_without_a_rotary_module_is_refused() -> None:
    model = llama("default", {})
    del model.model.rotary_emb
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no rotary module"):
        read_rotary(model)


@pytest.mark.parametrize(
    ("frequencies", "amplitude"),
    [(torch.ones(2, 2), 1.0), (torch.tensor(1.0), 1.0), (torch.ones(2), 0.0), (torch.ones(2), -1.0)],
)
def test_what_is_no_table_is_refused(frequencies: Tensor, amplitude: float) -> None:
    with pytest.raises(UnsupportedModelError, match="positive amplitude"):
        Rotary(frequencies, amplitude)


def test_equal_tables_compare_and_hash_equal() -> None:
    left, right = read_rotary(MODELS["yarn"]), read_rotary(llama("yarn", EXACT["yarn"]))
    assert left == right
    assert left != Rotary(left.inverse_frequencies, 1.0)
    assert left != Rotary(left.inverse_frequencies * 2, left.amplitude)
    assert hash(left) == hash(right)
