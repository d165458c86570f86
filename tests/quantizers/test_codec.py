"""Compositions of transforms, groups, scales and levels: laws of the contract, degenerate numbers, exact bytes."""

import itertools
from collections.abc import Callable
from typing import Any, ClassVar, cast

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qevict.config import dumps, loads
from qevict.contracts.quantizer import NOTHING_SHARED, Origin, Quantizer, for_windows, shared_bytes
from qevict.contracts.values import Codes, layout_bytes
from qevict.errors import PolicyError
from qevict.policies import qevict
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.quantizers.levels import shares_of
from qevict.quantizers.packing import unpack
from qevict.testing import QuantizerContract

Part = PerChannel | PerToken
UNEVEN = (0.0, 0.2, 0.45, 1.0)

KEYS = (
    PerChannel(3, scale_bits=4),
    PerChannel(4, scale_bits=8),
    PerChannel(3, scale_bits=4, centred=True),
    PerChannel(2, scope="sequence"),
    PerChannel(4, scope="sequence", scale_bits=4, centred=True),
    PerChannel(2, rotated=True),
    PerChannel(2, centred=True, rotated=True, normed=True),
    PerChannel(3, levels="normal"),
    PerChannel(2, torch.float32, levels=UNEVEN, scale_bits=8, normed=True),
)
VALUES = (
    PerToken(3, scale_bits=8),
    PerToken(2, torch.bfloat16, scale_bits=4, centred=True),
    PerToken(2, group_channels=8),
    PerToken(4, channel_scaled=True),
    PerToken(3, scale_bits=8, rotated=True, levels="normal"),
    PerToken(2, group_channels=16, scale_bits=4, centred=True, channel_scaled=True, rotated=True, levels=UNEVEN),
)


def brief(part: object) -> str:
    """A part by what is not its default."""
    if not isinstance(part, PerChannel | PerToken):
        return str(part)
    options = (f"{each.name}={getattr(part, each.name)}" for each in attrs.fields(type(part)))
    usual = repr(type(part)(part.bits))
    return f"{part.name}({', '.join(each for each in options if each not in usual)})"


parts = pytest.mark.parametrize("part", [*KEYS, *VALUES], ids=brief)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def origin(x: Tensor) -> Origin:
    return Origin(0, tuple(range(x.shape[0])))


def coded(part: Quantizer, x: Tensor) -> Codes:
    """Everything that ``decode`` is given."""
    shared = for_windows(part.fit(x, origin(x)), x.shape[1])
    return {**part.encode(x, shared), **shared}


def back(part: Quantizer, x: Tensor) -> Tensor:
    return part.decode(coded(part, x), x.shape[-1])


def half_a_gap(part: Part, x: Tensor) -> Tensor:
    """Half of the widest gap of each number's stored grid, carried back by whatever was done before the grid.

    Where scales are codes, a number may lie beyond its grid, by one step of the zero points or of the scales.
    """
    codes, head_dim, codec = coded(part, x), x.shape[-1], part._codec
    _, scale = codec.scales.read(codes)
    shares = shares_of(part.levels, part.bits)
    widest = (len(shares) - 1) * max(high - low for low, high in itertools.pairwise(shares))
    bound = (codec.groups.spread(scale, head_dim).transpose(-1, -2) * widest / 2).expand_as(x).double()
    if part.scale_bits:
        zero_step, scale_step = (codes[f"{name}_range"].double()[..., 1, None, None] for name in ("zero", "scale"))
        bound = bound.maximum(zero_step).maximum((len(shares) - 1) * scale_step)
    if getattr(part, "normed", False):
        bound = bound * codes["norm"].double().unsqueeze(-1)
    if part.rotated:  # the error of each channel of a block may add up in any one of them
        block = head_dim & -head_dim
        summed = bound.unflatten(-1, (-1, block)).sum(-1, keepdim=True).expand(-1, -1, -1, -1, block).flatten(-2)
        bound = summed / 2 ** ((block.bit_length() - 1) // 2)
    if getattr(part, "channel_scaled", False):
        bound = bound * codes["channel_scale"].double().unsqueeze(-2)
    return bound


def check_half_a_gap(part: Part, x: Tensor) -> None:
    decoded, bound = back(part, x), half_a_gap(part, x)
    fp32 = 2.0**-18 * (x.double().abs().amax((1, 2, 3), keepdim=True) + bound)
    assert bool(decoded.isfinite().all())
    assert bool(((decoded.double() - x.double()).abs() <= bound + fp32).all())


@given(
    part=st.sampled_from([*KEYS, *VALUES]),
    offset=st.sampled_from([0.0, 60.0, -45.0, 1e3, 3e-5]),
    spread=st.sampled_from([0.0, 1e-7, 1e-4, 1e-2, 1.0, 30.0, 1e3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=80)
def test_error_is_at_most_half_the_widest_gap_of_the_stored_grid(
    part: Part, offset: float, spread: float, dtype: torch.dtype, seed: int
) -> None:
    """Offsets of channels, as a bias makes them, and of tokens."""
    channels, tokens = offset * normal(1, 1, 1, 16, seed=seed), offset * normal(1, 1, 8, 1, seed=seed + 1).abs()
    check_half_a_gap(part, (channels + tokens + spread * normal(2, 3, 8, 16, seed=seed)).to(dtype))


# ── C25: constant, all-zero and nearly constant channels and tokens, beside normal ones ───────────

DEGENERATE: dict[str, Callable[[Tensor], Tensor]] = {
    "0": torch.zeros_like,
    "3.0": lambda group: torch.full_like(group, 3.0),
    "-1e4": lambda group: torch.full_like(group, -1e4),
    "1e-30": lambda group: torch.full_like(group, 1e-30),
    "range 1e-40": lambda group: torch.linspace(0, 1e-40, len(group)),
    "one odd": lambda group: torch.full_like(group, 2.5).index_fill(0, torch.tensor([3]), -7.25),
}


@parts
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_channels_and_tokens_stay_finite_and_within_the_law(part: Part, case: str) -> None:
    for place in ((0, 1, slice(None), 3), (0, 1, 3), (0, slice(None), slice(None), 3)):
        x = normal(1, 2, 8, 16)
        x[place] = DEGENERATE[case](x[place].flatten()).view_as(x[place])
        check_half_a_gap(part, x)


@parts
def test_zeros_throughout_come_back_as_zeros(part: Part) -> None:
    x = torch.zeros(1, 3, 8, 16)
    assert torch.equal(back(part, x), x)


@pytest.mark.parametrize("part", [each for each in (*KEYS, *VALUES) if each.centred], ids=brief)
def test_centred_channels_that_never_change_are_exact(part: Part) -> None:
    """Each at a value of its own that the parameters' dtype holds."""
    x = torch.linspace(-60, 60, 16).to(part.parameters).float().expand(1, 3, 8, 16)
    torch.testing.assert_close(back(part, x), x, rtol=0, atol=0)


def test_dead_tokens_and_channels_are_exact_where_they_have_a_scale_of_their_own() -> None:
    x = normal(1, 2, 8, 16)
    x[0, 1, 3], x[..., 5] = 0, 0
    assert (back(PerChannel(2, normed=True, rotated=True), x)[0, 1, 3] == 0).all()
    assert (back(PerToken(2, channel_scaled=True), x)[..., 5] == 0).all()


# ── Statistics of a sequence ──────────────────────────────────────────────────────────────────────


def test_later_numbers_beyond_the_grid_of_a_sequence_are_given_its_nearest_end() -> None:
    part, first = PerChannel(2, scope="sequence"), normal(1, 4, 8, 16)
    shared = for_windows(part.fit(first, origin(first)), 4)
    later = torch.where(normal(1, 4, 8, 16, seed=1) > 0, 100.0, -100.0)
    decoded = part.decode({**part.encode(later, shared), **shared}, 16)
    low, high = first.amin((1, 2)), first.amax((1, 2))
    expected = torch.where(later > 0, high[:, None, None], low[:, None, None])
    torch.testing.assert_close(decoded, expected, rtol=2e-3, atol=2e-3)


def test_one_token_windows_have_the_grid_of_their_sequence() -> None:
    """Their own would be a number each; that is refused, with the remedy."""
    part, x = PerChannel(4, scope="sequence"), normal(1, 32, 1, 16)
    assert layout_bytes(part.layout(1, 16)) == 8
    check_half_a_gap(part, x)
    assert 0 < (back(part, x) - x).abs().max() < 0.5
    with pytest.raises(PolicyError, match="at least 2 tokens"):
        PerChannel(4, centred=True).layout(1, 16)


# ── Bytes, and who may read them ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("part", "window", "shared"),
    [
        # A window of 8 tokens and 128 channels: codes, then scales and zero points.
        (PerChannel(3, scale_bits=4), 384 + 2 * 64 + 8, 0),
        (PerChannel(3, scale_bits=4, centred=True), 384 + 2 * 64 + 8, 256),
        (PerChannel(3, torch.float32, scale_bits=8), 384 + 2 * 128 + 16, 0),
        (PerChannel(2, scope="sequence"), 256, 512),
        (PerChannel(2, scope="sequence", scale_bits=4, centred=True), 256, 2 * 64 + 8 + 256),
        (PerChannel(2, rotated=True, normed=True, levels="normal"), 256 + 512 + 16, 0),
        (PerToken(3, scale_bits=8), 384 + 2 * 8 + 8, 0),
        (PerToken(2, group_channels=32), 256 + 4 * 8 * 4, 0),
        (PerToken(2, group_channels=32, scale_bits=4), 256 + 4 * 8 + 8, 0),
        (PerToken(2, centred=True, channel_scaled=True, rotated=True), 256 + 8 * 4, 2 * 256),
    ],
    ids=brief,
)
def test_bytes(part: Part, window: int, shared: int) -> None:
    x = normal(1, 2, 8, 128)
    assert layout_bytes(part.layout(8, 128)) == window
    assert sum(array.nbytes for array in part.encode(x, for_windows(part.fit(x, origin(x)), 2)).values()) == 2 * window
    assert layout_bytes(part.shared_layout(128)) == shared
    assert sum(array.nbytes for array in part.fit(x, origin(x)).values()) == shared
    assert shared_bytes(part, part, 128, 3) == 6 * shared


def test_backends_are_told_what_there_is_to_read() -> None:
    """Plain codes have a number for each code, and one grid for each group; the kit reads them all, bit by bit."""
    for part in (*KEYS, *VALUES):
        assert part.paired.plain == (part == PerChannel(2, scope="sequence")), part
        assert part.keeps_constants == (part in KEYS[:2] or part in {KEYS[7], VALUES[0], VALUES[2]}), part


def test_the_layout_names_everything_that_is_undone() -> None:
    values = VALUES[5].paired
    assert (values.bits, values.per, values.group_channels, values.scale_bits) == (2, "token", 16, 4)
    assert values.places == pytest.approx((0.0, 0.6, 1.35, 3.0))
    assert values.undone == ("hadamard", "channel_scale", "mean")
    assert KEYS[6].paired.undone == ("norm", "hadamard", "mean")


def test_the_grid_of_a_sequence_is_offered_to_backends() -> None:
    part, x = PerChannel(2, scope="sequence"), normal(2, 6, 8, 16)
    assert part.paired is not None
    codes = coded(part, x)
    levels = part.paired.levels(codes["codes"], 8, 2).permute(0, 3, 2, 1, 4).flatten(3)
    scale, zero = (codes[name].float().unsqueeze(-2) for name in ("scale", "zero"))
    torch.testing.assert_close(zero + scale * levels, part.decode(codes, 16))


def test_a_quantizer_that_shares_nothing_fits_nothing() -> None:
    assert PerToken(2, rotated=True).fit(normal(1, 2, 8, 16), Origin(0, (0,))) is NOTHING_SHARED


# ── Values of others ──────────────────────────────────────────────────────────────────────────────


def test_the_groups_of_kivi_are_heads_of_fewer_channels() -> None:
    x = normal(2, 3, 8, 64)
    grouped, whole = PerToken(2, group_channels=32), PerToken(2)
    halves = torch.cat([back(whole, half) for half in x.chunk(2, dim=-1)], dim=-1)
    assert torch.equal(back(grouped, x), halves)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [(4, [[15, 5, 0, 8], [0, 12, 15, 15], [15, 2, 5, 0]]), (2, [[3, 1, 0, 2], [0, 2, 3, 3], [3, 0, 1, 0]])],
)
def test_the_values_of_the_zipcache_example(bits: int, expected: list[list[int]]) -> None:
    """ZipCache (arXiv 2405.14256), worked by hand: three tokens of four channels."""
    x = torch.tensor([[16.0, 1.0, -0.25, 4.0], [-4.0, 0.25, 0.25, 1.0], [8.0, -0.5, 0.0, -2.0]]).view(1, 1, 3, 4)
    part = PerToken(bits, channel_scaled=True)
    codes = coded(part, torch.cat((x, 0 * x[:, :, :1]), dim=2))
    by_pair = unpack(codes["codes"], bits).view(2, 2, 4).transpose(0, 1).reshape(4, 4)
    assert by_pair.T[:3].tolist() == expected


def test_the_keys_of_the_oscar_example() -> None:
    """OScaR (arXiv 2605.19660), worked by hand: four keys, the first a small sink; error of each by its length."""
    x = torch.tensor([[0.1, 0, 0.1, 0], [8, 1, -1, 2], [7, -1, 2, 1], [9, 2, 1, -2]]).view(1, 1, 4, 4)

    def errors(part: Part) -> list[float]:
        found: list[float] = ((back(part, x) - x).norm(dim=-1) / x.norm(dim=-1)).flatten().tolist()
        return found

    single = torch.float32
    assert errors(PerChannel(2, single)) == pytest.approx([4.767, 0.12, 0.138, 0], abs=1e-3)
    assert errors(PerChannel(2, single, rotated=True)) == pytest.approx([0, 0.032, 0.119, 0.035], abs=1e-3)
    part = PerChannel(2, single, rotated=True, normed=True)
    assert errors(part) == pytest.approx([0, 0.057, 0.095, 0.027], abs=1e-3)
    assert part.encode(x)["norm"].flatten().tolist() == pytest.approx([0.1414, 8.3666, 7.4162, 9.4868], abs=1e-4)


# ── Promised quality ──────────────────────────────────────────────────────────────────────────────


@parts
@pytest.mark.parametrize(("window", "head_dim"), [(8, 64), (32, 128), (512, 16)])
def test_the_promised_signal_to_noise_ratio_is_kept(part: Part, window: int, head_dim: int) -> None:
    x = normal(1, 16384 // (window * head_dim), window, head_dim)
    snr_db = float(10 * (x.square().mean() / (back(part, x) - x).square().mean()).log10())
    assert snr_db >= part.min_snr_db


@pytest.mark.parametrize("part", [PerChannel(2, scale_bits=4), PerToken(3, group_channels=8, scale_bits=4)], ids=brief)
def test_scales_that_are_codes_lose_no_more_than_by_rounding_outwards(part: Part) -> None:
    """In no group; and much less in all."""
    x, codec = normal(1, 4, 8, 16) + 3 * normal(16, seed=1), part._codec
    y = x.transpose(-1, -2)
    outwards = codec.scales.cover(*codec.groups.ends(y), 2**part.bits - 1, lambda zero, _: torch.zeros_like(zero))
    found, worse = (codec._loss(y, *codec.scales.read(codes)) for codes in (part.encode(x), outwards))
    assert (found <= worse).all()
    assert found.sum() < 0.8 * worse.sum()
    torch.testing.assert_close(found.sum(), (back(part, x) - x).double().square().sum())


def test_the_scales_of_a_sequence_are_chosen_by_all_its_windows() -> None:
    """Were it by the first alone, whose numbers are small, others would lose more than by rounding outwards."""
    part, x = PerChannel(2, scope="sequence", scale_bits=4), normal(1, 6, 8, 16) * normal(16, seed=1).exp()
    x[:, 0] *= 0.1
    low, high = x.amin((1, 2)), x.amax((1, 2))
    outwards = part._codec.scales.fit(low, high, 3, lambda zero, _: torch.zeros_like(zero))

    def losses(shared: Codes) -> Tensor:
        each = for_windows(shared, 6)
        return (part.decode({**part.encode(x, each), **each}, 16) - x).double().square().sum((1, 2))

    assert (losses(part.fit(x, origin(x))) <= losses(outwards)).all()


def test_a_grid_over_a_long_sequence_is_promised_less() -> None:
    """8192 numbers reach further than 1024."""
    part, x = PerChannel(2, scope="sequence"), normal(1, 1024, 8, 2)
    snr_db = float(10 * (x.square().mean() / (back(part, x) - x).square().mean()).log10())
    assert part.min_snr_db < snr_db < PerChannel(2).min_snr_db


def attention(queries: Tensor, keys: Tensor) -> Tensor:
    weights: Tensor = (queries @ keys.T / keys.shape[1] ** 0.5).softmax(1)
    return weights


@pytest.mark.parametrize("window", [8, 32])
@pytest.mark.parametrize(
    ("part", "favourites"),
    [
        (PerChannel(4, scale_bits=8), 0.85),
        (PerChannel(4, scale_bits=4, centred=True), 0.85),
        (PerChannel(4, scale_bits=4, centred=True, rotated=True), 0.85),
        (PerChannel(4, rotated=True), 0.85),
        (PerChannel(4, centred=True, rotated=True, normed=True), 0.85),
        (PerChannel(4, scope="sequence"), 0.78),
        (PerChannel(4, levels="normal"), 0.85),
        (PerToken(4, scale_bits=8, centred=True, rotated=True, levels="normal"), 0.85),
    ],
    ids=brief,
)
def test_c16_attention_keeps_its_shape_where_key_channels_are_far_off(
    part: Part, favourites: float, window: int
) -> None:
    """Case C16: within 0.08 in total variation, and most queries keep the key that they attend to most.

    For the default it is 0.85 of them. A grid over 256 tokens is wider than one over 8.
    """
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(256, 128, generator=generator) for _ in range(2))
    keys[:, 3] += 60
    keys[:, 77] -= 45
    rebuilt = back(part, keys.view(1, -1, window, 128)).reshape(256, 128)
    before, after = attention(queries, keys), attention(queries, rebuilt)
    assert 0 < (before - after).abs().sum(1).mean() / 2 < 0.08
    assert (before.argmax(1) == after.argmax(1)).float().mean() > favourites


# ── Refusals, and files ───────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerChannel(3, scale_bits=3), r"scale_bits=3 is unknown; allowed: 4, 8, or None"),
        (lambda: PerToken(3, scale_bits=16), r"scale_bits=16 is unknown; allowed: 4, 8, or None"),
        (lambda: PerChannel(3, scope=cast("Any", "row")), r"scope='row' is unknown; allowed: 'window', 'sequence'"),
        (lambda: PerToken(2, rotated=1), r"rotated is True or False, got 1"),  # type: ignore[arg-type]
        (lambda: PerToken(group_channels=0), r"group_channels=0 is no number of channels; give 1 or more"),
        (
            lambda: PerToken(group_channels=32).layout(8, 80),
            r"80 channels are no groups of 32; group_channels must divide",
        ),
        (lambda: PerToken(scale_bits=4).layout(5, 16), r"5 scales of 4 bits do not fill whole bytes"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make()


@pytest.mark.parametrize(("keys", "values"), list(itertools.zip_longest(KEYS, VALUES, fillvalue=VALUES[-1])), ids=brief)
def test_files_hold_every_option(keys: PerChannel, values: PerToken) -> None:
    policy = qevict("20 %").with_tier("int2", keys=keys, values=values)
    assert loads(dumps(policy)) == policy


# ── The kit ───────────────────────────────────────────────────────────────────────────────────────


class CodecContract(QuantizerContract):
    """The kit, with the bound that a composition has: half of the widest gap of its stored grid."""

    examples: ClassVar[int] = 8

    def error_bound(self, x: Tensor) -> Tensor:
        assert isinstance(self.part, PerChannel | PerToken)
        bound = half_a_gap(self.part, x.float())
        return bound + 2.0**-18 * (x.abs().amax((1, 2, 3), keepdim=True) + bound)


for number, each in enumerate((KEYS[1], KEYS[4], KEYS[6], VALUES[5])):
    globals()[f"TestCodec{number}"] = type(
        f"TestCodec{number}", (CodecContract,), {"part": each, "__module__": __name__}
    )
