"""Min-max grids: the laws of the quantizer contract, degenerate groups (case C25), and exact bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qevict.contracts.paired import by_channels
from qevict.contracts.quantizer import Quantizer, window_bytes
from qevict.contracts.values import Codes, layout_bytes
from qevict.errors import PolicyError
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.quantizers.packing import unpack

BITS = (2, 3, 4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Kind = type[PerChannel] | type[PerToken]
KINDS: tuple[Kind, ...] = (PerChannel, PerToken)

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
all_bits = pytest.mark.parametrize("bits", BITS)
parameter_dtypes = pytest.mark.parametrize("parameters", DTYPES, ids=str)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def axis_of(kind: Kind) -> int:
    """The axis of ``[heads, windows, window, head_dim]`` that a group runs along."""
    return -2 if kind is PerChannel else -1


def stored(codes: Codes, name: str, kind: Kind) -> Tensor:
    """Scale or zero point of each element."""
    return codes[name].double().unsqueeze(axis_of(kind))


def smallest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def check_half_a_step(kind: Kind, quantizer: Quantizer, x: Tensor) -> None:
    """Error at most half a STORED step; and the step no wider than outward rounding makes it."""
    codes = quantizer.encode(x)
    decoded = quantizer.decode(codes, x.shape[-1])
    assert decoded.dtype == torch.float32
    assert decoded.shape == x.shape
    assert bool(decoded.isfinite().all())
    step, zero, exact = stored(codes, "scale", kind), stored(codes, "zero", kind), x.double()
    fp32 = 2.0**-22 * (exact.abs().amax() + step)
    assert bool(((decoded.double() - exact).abs() <= step / 2 + fp32).all())
    low, high = exact.amin(axis_of(kind), keepdim=True), exact.amax(axis_of(kind), keepdim=True)
    parameters = codes["scale"].dtype
    eps, tiny, levels = torch.finfo(parameters).eps, smallest(parameters), 2**quantizer.bits - 1
    assert bool((zero <= low).all())
    assert bool((zero >= low - eps * low.abs() - tiny).all())
    widest = (high - low + eps * low.abs() + tiny + fp32) / levels * (1 + 2 * eps) + 2 * tiny
    assert bool((step <= widest).all())


@given(
    kind=st.sampled_from(KINDS),
    bits=st.sampled_from(BITS),
    parameters=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
    offset=st.sampled_from([0.0, 60.0, -45.0, 1e4, -1e4, 3e-5]),
    spread=st.sampled_from([0.0, 1e-7, 1e-4, 1e-2, 1.0, 30.0, 5e3]),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=300)
def test_error_is_at_most_half_a_stored_step(
    kind: Kind, bits: int, parameters: torch.dtype, dtype: torch.dtype, offset: float, spread: float, seed: int
) -> None:
    """Offsets far beyond what the parameters resolve beside the data's range: large key biases."""
    x = (offset + spread * normal(2, 3, 8, 16, seed=seed)).to(dtype)
    check_half_a_step(kind, kind(bits, parameters), x)


@given(
    st.sampled_from(KINDS),
    st.sampled_from(BITS),
    st.sampled_from(DTYPES),
    st.lists(st.floats(-65504, 65504, width=32), min_size=32, max_size=32),
)
@settings(deadline=None, max_examples=150)
def test_error_is_at_most_half_a_stored_step_for_any_numbers_in_range(
    kind: Kind, bits: int, parameters: torch.dtype, values: list[float]
) -> None:
    check_half_a_step(kind, kind(bits, parameters), torch.tensor(values).view(1, 1, 4, 8))


@kinds
@all_bits
def test_values_beyond_the_parameters_range_stay_finite(kind: Kind, bits: int) -> None:
    """An fp16 grid cannot reach them, but a number is clamped, never made infinite or NaN."""
    x = 5e4 * normal(1, 2, 8, 16)
    assert float(x.min()) < -65504
    assert float(x.max()) > 65504
    quantizer = kind(bits)
    codes = quantizer.encode(x)
    assert bool(codes["zero"].isfinite().all())
    assert bool(codes["scale"].isfinite().all())
    assert bool(quantizer.decode(codes, 16).isfinite().all())


@kinds
@all_bits
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
def test_wider_parameters_reach_them(kind: Kind, bits: int, parameters: torch.dtype) -> None:
    check_half_a_step(kind, kind(bits, parameters), 1e7 * normal(1, 2, 8, 16))


# ── C25: constant, all-zero and nearly constant groups, beside a normal neighbour ──────────────────


def _one_odd(group: Tensor) -> Tensor:
    odd = torch.full_like(group, 2.5)
    odd[17] = -7.25
    return odd


DEGENERATE: dict[str, Callable[[Tensor], Tensor]] = {
    "0": torch.zeros_like,
    "3.0": lambda group: torch.full_like(group, 3.0),
    "-1e4": lambda group: torch.full_like(group, -1e4),
    "1e-30": lambda group: torch.full_like(group, 1e-30),
    "-1e-30": lambda group: torch.full_like(group, -1e-30),
    "range 1e-40": lambda group: torch.linspace(0, 1e-40, len(group)),
    "one odd among 31 equal": _one_odd,
}


@kinds
@all_bits
@parameter_dtypes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_groups_come_back_and_disturb_nobody(
    kind: Kind, bits: int, parameters: torch.dtype, dtype: torch.dtype, case: str
) -> None:
    """Finite, within half a step, constants exactly (zeros as zeros), every other group as without it."""
    usual = normal(1, 2, 32, 32).to(dtype)
    x = usual.clone()
    group = (0, 1, slice(None), 3) if kind is PerChannel else (0, 1, 3)
    x[group] = DEGENERATE[case](usual[group].float()).to(dtype)
    quantizer = kind(bits, parameters)
    check_half_a_step(kind, quantizer, x)
    decoded, undisturbed = (quantizer.decode(quantizer.encode(x), 32), quantizer.decode(quantizer.encode(usual), 32))
    constant = x[group].float()
    if bool((constant == constant[0]).all()) and float(constant[0].to(parameters)) == float(constant[0]):
        assert torch.equal(decoded[group], constant)
    decoded[group] = undisturbed[group] = 0
    assert torch.equal(decoded, undisturbed)


@kinds
@all_bits
@given(st.floats(-65504, 65504, width=16))
@settings(deadline=None, max_examples=50)
def test_any_constant_that_the_parameters_hold_is_exact(kind: Kind, bits: int, constant: float) -> None:
    x = torch.full((1, 1, 8, 16), constant)
    quantizer = kind(bits)
    assert torch.equal(quantizer.decode(quantizer.encode(x), 16), x)


# ── Bytes ─────────────────────────────────────────────────────────────────────────────────────────


@kinds
@all_bits
@parameter_dtypes
@pytest.mark.parametrize(("window", "head_dim"), [(8, 128), (16, 64), (2, 80), (5, 96), (32, 40)])
def test_the_layout_is_what_encode_returns(
    kind: Kind, bits: int, parameters: torch.dtype, window: int, head_dim: int
) -> None:
    quantizer = kind(bits, parameters)
    layout = quantizer.layout(window, head_dim)
    codes = quantizer.encode(normal(2, 3, window, head_dim))
    assert codes.keys() == layout.keys()
    for name, spec in layout.items():
        assert codes[name].dtype == spec.dtype
        assert codes[name].shape == (2, 3, *spec.shape)
    real = sum(array.contiguous().clone().untyped_storage().nbytes() for array in codes.values())
    assert real == 2 * 3 * layout_bytes(layout)
    groups = head_dim if kind is PerChannel else window
    assert layout_bytes(layout) == window * head_dim * bits // 8 + 2 * groups * parameters.itemsize


@pytest.mark.parametrize(("bits", "expected"), [(2, 8448), (3, 10496), (4, 12544), (8, 20736)])
def test_bytes_of_a_window_of_llama_3_1_8b(bits: int, expected: int) -> None:
    """8 KV heads of 128 channels, 8 tokens, fp16 scales and zeros; in full precision they take 32768."""
    keys, values = PerChannel(bits), PerToken(bits)
    assert window_bytes(keys, values, window_tokens=8, head_dim=128, kv_heads=8) == expected
    x = normal(8, 1, 8, 128)
    arrays = [*keys.encode(x).values(), *values.encode(x).values()]
    assert sum(array.contiguous().clone().untyped_storage().nbytes() for array in arrays) == expected
    assert 2 * x.bfloat16().nbytes == 32768


def test_keys_and_values_may_differ_in_bits() -> None:
    assert window_bytes(PerChannel(4), PerToken(2), 8, 128, 8) == 8 * (128 * (8 * 4 // 8 + 4) + 8 * (128 * 2 // 8 + 4))


# ── Examples worked by hand elsewhere ─────────────────────────────────────────────────────────────


def codes_of(quantizer: PerChannel | PerToken, x: Tensor) -> Tensor:
    """Unpacked codes ``[head_dim, window]`` of the first window."""
    codes: Tensor = unpack(quantizer.encode(x)["codes"], quantizer.bits)[0, 0]
    return codes.view(x.shape[-1], x.shape[-2])


def test_the_int2_example_of_the_qevict_study_survives_promotion_and_demotion() -> None:
    """One key channel over a window of 8: codes 1 0 3 1 1 2 2 0, also after decoding and encoding again."""
    channel = torch.tensor([0.13, -0.7, 1.9, 0.02, -0.33, 0.5, 1.1, -1.2])
    x = torch.stack((channel, normal(8)), dim=-1)[None, None]
    quantizer = PerChannel(2)
    assert codes_of(quantizer, x)[0].tolist() == [1, 0, 3, 1, 1, 2, 2, 0]
    promoted = quantizer.decode(quantizer.encode(x), 2)
    assert codes_of(quantizer, promoted)[0].tolist() == [1, 0, 3, 1, 1, 2, 2, 0]


def test_the_key_channels_and_the_value_row_of_the_kivi_example() -> None:
    """KIVI (arXiv 2402.02750): a ramp and a channel with two outliers over 16 tokens; a row of 8 values."""
    ramp, spiked = torch.arange(16.0), torch.zeros(16)
    spiked[5], spiked[9] = 30, -30
    x = torch.stack((ramp, spiked), dim=-1)[None, None]
    keys = PerChannel(2)
    codes = keys.encode(x)
    assert codes["scale"].tolist() == [[[5.0, 20.0]]]
    assert codes["zero"].tolist() == [[[0.0, -30.0]]]
    words = [int.from_bytes(bytes(half), "little", signed=True) for half in codes["codes"][0, 0].view(2, 4).tolist()]
    assert words == [-22391488, -1432179030]
    assert keys.decode(codes, 2)[0, 0, 0, 1] == 10
    row = torch.linspace(-3, 3, 8).expand(1, 1, 1, 8)
    assert by_channels(codes_of(PerToken(2), row))[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


# ── Promised quality ──────────────────────────────────────────────────────────────────────────────


@kinds
@all_bits
@parameter_dtypes
@pytest.mark.parametrize(("window", "head_dim"), [(8, 64), (8, 128), (16, 96), (32, 256)])
def test_the_promised_signal_to_noise_ratio_is_kept(
    kind: Kind, bits: int, parameters: torch.dtype, window: int, head_dim: int
) -> None:
    quantizer, x = kind(bits, parameters), normal(4, 64, window, head_dim)
    noise = quantizer.decode(quantizer.encode(x), head_dim) - x
    snr_db = float(10 * (x.square().mean() / noise.square().mean()).log10())
    assert snr_db >= quantizer.min_snr_db


@kinds
def test_more_bits_promise_more(kind: Kind) -> None:
    promised = [kind(bits).min_snr_db for bits in BITS]
    assert promised == sorted(promised)
    assert promised[0] > 3


# ── Refusals ──────────────────────────────────────────────────────────────────────────────────────


@all_bits
def test_one_token_windows_are_refused_per_channel_with_the_remedy(bits: int) -> None:
    with pytest.raises(PolicyError, match=r"at least 2 tokens.*use per_token or longer windows"):
        PerChannel(bits).layout(1, 64)
    assert layout_bytes(PerToken(bits).layout(1, 64)) == 64 * bits // 8 + 4


@kinds
@pytest.mark.parametrize(("bits", "window", "head_dim", "multiple"), [(2, 3, 10, 4), (3, 2, 10, 8)])
def test_shapes_that_do_not_fill_bytes_are_refused_with_the_allowed_multiple(
    kind: Kind, bits: int, window: int, head_dim: int, multiple: int
) -> None:
    with pytest.raises(PolicyError, match=rf"multiple of {multiple}\b.*change window_tokens or bits"):
        kind(bits).layout(window, head_dim)


@pytest.mark.usefixtures("unchecked")
@kinds
@pytest.mark.parametrize("bits", [0, 1, 5, 6, 7, 16, -2, True, "2", 2.0, None])
def test_unknown_bits_are_refused_naming_the_known(kind: Kind, bits: Any) -> None:
    with pytest.raises(PolicyError, match="allowed: 2, 3, 4, 8"):
        kind(bits)


@pytest.mark.usefixtures("unchecked")
@kinds
@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.uint8, "float16", None])
def test_unknown_parameter_dtypes_are_refused_naming_the_known(kind: Kind, dtype: Any) -> None:
    with pytest.raises(PolicyError, match=r"allowed: torch\.float16, torch\.bfloat16, torch\.float32"):
        kind(2, dtype)


def test_quantizers_are_values() -> None:
    assert PerChannel(2) == PerChannel(bits=2, parameters=torch.float16)
    assert hash(PerToken(4)) == hash(PerToken(4))
    assert len({PerChannel(2), PerChannel(2), PerChannel(4), PerToken(2), PerChannel(2, torch.float32)}) == 4
