"""Each law of quantizers is broken by some quantizer, and the kit says so."""

from typing import ClassVar

import attrs
import pytest
import torch
from tests.breaking import Break, breaks, laws_of, passes, report
from torch import Tensor

from qevict.contracts.paired import PairedCodes
from qevict.contracts.quantizer import NOTHING_SHARED, Origin, Quantizer
from qevict.contracts.values import ArraySpec, Codes, Layout
from qevict.errors import PolicyError
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.testing import QuantizerContract


@attrs.frozen
class RandomDecode(PerToken):
    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        x = super().decode(codes, head_dim)
        return x + 1e-6 * torch.rand_like(x)


@attrs.frozen(eq=False)
class KeepsTheLast(PerToken):
    """Decodes by what it saw, not by the codes."""

    last: list[Tensor] = attrs.field(factory=list, repr=False)

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        self.last[:] = [x.float()]
        return super().encode(x)

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        return self.last[0] if self.last else super().decode(codes, head_dim)


@attrs.frozen
class OtherLayout(PerToken):
    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        layout = super().layout(window_tokens, head_dim)
        return {**layout, "codes": ArraySpec((layout["codes"].shape[0] - 1,), torch.uint8)}


@attrs.frozen
class UntoldArray(PerToken):
    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        return {**super().encode(x), "norm": x.norm(dim=-1)}


@attrs.frozen
class WiderArray(PerToken):
    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        codes = super().encode(x)
        return {**codes, "scale": codes["scale"].float()}


@attrs.frozen
class RoundsToNearest(PerToken):
    """A grid that is shifted off the data where an offset exceeds what fp16 resolves."""

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        codes, low = super().encode(x), x.float().amin(-1)
        return {**codes, "zero": torch.nextafter(low.half(), torch.tensor(torch.inf, dtype=torch.float16))}


@attrs.frozen
class Floors(PerToken):
    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        codes = super().encode(x)
        return {**codes, "zero": codes["zero"] + codes["scale"] / 2}


@attrs.frozen
class WidensConstants(PerToken):
    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        codes = super().encode(x)
        return {**codes, "zero": codes["zero"] - 2**-20}


@attrs.frozen
class SharesAcrossWindows(PerToken):
    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        return super().encode(x.float() - x.float().mean(dim=1, keepdim=True))


@attrs.frozen
class SharesAcrossHeads(PerToken):
    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        return super().encode(x.float() + x.float().amax(dim=0, keepdim=True))


@attrs.frozen
class EncodesWithOneScale(PerToken):
    """Says that all heads have the scale of head 0."""

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        codes = super().encode(x)
        return {**codes, "scale": codes["scale"][:1].expand_as(codes["scale"])}


@attrs.frozen
class DecodesWithOneScale(PerToken):
    """Right for the first window only."""

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        scale = codes["scale"]
        return super().decode({**codes, "scale": scale[:, :1].expand_as(scale)}, head_dim)


@attrs.frozen
class SaysItHasMoreBits(PerToken):
    """Encodes in 2 bits, whatever it is asked for."""

    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        return PerToken(2).layout(window_tokens, head_dim)

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        return PerToken(2).encode(x)

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        return PerToken(2).decode(codes, head_dim)


@attrs.frozen
class ComputesInTheModelsDtype(PerToken):
    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        return super().encode((x * 1.01 - x * 0.01).float())


@attrs.frozen
class ChangesItsInput(PerToken):
    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        return super().encode(x.add_(1))


@attrs.frozen
class Boasts(PerToken):
    @property
    def min_snr_db(self) -> float:
        return 6.02 * self.bits


@attrs.frozen
class SaysItIsIdempotent(PerToken):
    idempotent: ClassVar[bool] = True

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        return super().decode(codes, head_dim) * 1.3


@attrs.frozen
class DecodesInHalf(PerToken):
    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        return super().decode(codes, head_dim).half()


@attrs.frozen
class RefusesRudely(PerToken):
    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        if window_tokens % 2:
            raise IndexError("odd")
        return super().layout(window_tokens, head_dim)


@attrs.frozen
class LooksAtItsScales(PerToken):
    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        x = super().decode(codes, head_dim)
        return x if bool((codes["scale"] > 0).all()) else x + 0


@attrs.frozen
class SharesUntold(PerToken):
    """Shares what its layout does not name."""

    def fit(self, x: Tensor, origin: Origin) -> Codes:
        return {"mean": x.float().mean((1, 2))}


@attrs.frozen
class SharesItsScale(PerToken):
    """Under a name that each window has as well."""

    def shared_layout(self, head_dim: int) -> Layout:
        return {"scale": ArraySpec((head_dim,), torch.float32)}

    def fit(self, x: Tensor, origin: Origin) -> Codes:
        return {"scale": x.float().mean((1, 2))}


@attrs.frozen
class SharesOneMean(PerToken):
    """The mean of all heads."""

    def shared_layout(self, head_dim: int) -> Layout:
        return {"mean": ArraySpec((head_dim,), torch.float32)}

    def fit(self, x: Tensor, origin: Origin) -> Codes:
        return {"mean": x.float().mean((0, 1, 2)).expand(x.shape[0], -1)}


@attrs.frozen
class LiesAboutItsLayout(PerToken):
    """Its codes stand for themselves."""

    @property
    def paired(self) -> PairedCodes:
        return PairedCodes(self.bits, "token", places=(0.0, 0.5, 2.0, 3.0))


BREAKS = (
    Break("test_the_layout_refuses_politely", RefusesRudely(), "it raised IndexError: odd"),
    Break("test_the_layout_has_room_for_every_code", SaysItHasMoreBits(8), "1 x 64 codes of 8 bits need 512 bits"),
    Break("test_it_rebuilds_what_its_layout_accepts", DecodesInHalf(), "decode gave torch.float16"),
    Break("test_codes_are_what_the_layout_says", OtherLayout(), "layout says"),
    Break("test_codes_are_what_the_layout_says", UntoldArray(), "'norm'"),
    Break("test_codes_are_what_the_layout_says", WiderArray(), "'scale' is torch.float32"),
    Break("test_what_is_shared_is_what_the_layout_says", SharesUntold(), "fit gave ['mean']"),
    Break("test_what_is_shared_is_what_the_layout_says", SharesItsScale(), "belong to each window as well"),
    Break("test_heads_are_fitted_apart", SharesOneMean(), "share other numbers"),
    Break("test_paired_codes_are_what_their_layout_says", LiesAboutItsLayout(), "read bit by bit"),
    Break("test_decoding_is_a_function_of_the_codes_alone", RandomDecode(), "decoding the same codes again"),
    Break("test_decoding_is_a_function_of_the_codes_alone", KeepsTheLast(), "gave other numbers"),
    Break("test_the_error_is_at_most_half_a_step", RoundsToNearest(), "came back as"),
    Break("test_the_error_is_at_most_half_a_step", Floors(8), "came back as"),
    Break("test_the_error_is_at_most_half_a_step", EncodesWithOneScale(), "came back as"),
    Break("test_the_error_is_at_most_half_a_step", DecodesWithOneScale(), "came back as"),
    Break("test_a_constant_comes_back_exactly", WidensConstants(2, torch.float32), "a window of"),
    Break("test_windows_and_heads_are_encoded_apart", SharesAcrossWindows(), "has other codes"),
    Break("test_windows_and_heads_are_encoded_apart", SharesAcrossHeads(), "has other codes"),
    Break("test_windows_and_heads_are_encoded_apart", EncodesWithOneScale(), "has other codes"),
    Break("test_encoding_computes_in_fp32", ComputesInTheModelsDtype(), "have other codes in torch."),
    Break("test_encoding_computes_in_fp32", ChangesItsInput(), "encode changed its input"),
    Break("test_the_promised_signal_to_noise_ratio_is_kept", Boasts(), "12.04 dB are promised"),
    Break("test_encoding_again_gives_the_same_codes", SaysItIsIdempotent(), "differs at the second time"),
    Break("test_the_host_never_waits", LooksAtItsScales(), "_local_scalar_dense"),
)


@breaks(*BREAKS)
def test_a_broken_quantizer_is_told_which_law_it_breaks(broken: Break) -> None:
    report(QuantizerContract, broken)


def test_every_law_is_broken_by_some_quantizer() -> None:
    assert {each.law for each in BREAKS} == laws_of(QuantizerContract)


def test_who_declares_not_to_be_idempotent_is_skipped_with_that_reason() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"PerToken\(.*\) declares idempotent = False"):
        passes(QuantizerContract, PerToken(), "test_encoding_again_gives_the_same_codes")


def test_only_windows_that_the_layout_accepts_are_encoded() -> None:
    @attrs.frozen
    class Counts(PerChannel):
        def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
            assert x.shape[-2] != 1
            return super().encode(x)

    passes(QuantizerContract, Counts(), "test_codes_are_what_the_layout_says")


def test_a_quantizer_that_accepts_no_shape_is_told_to_name_some() -> None:
    @attrs.frozen
    class Picky(PerToken):
        def layout(self, window_tokens: int, head_dim: int) -> Layout:
            raise PolicyError("head_dim must be 7")

    with pytest.raises(ValueError, match=r"set `shapes` .* in Judged .*head_dim must be 7"):
        passes(QuantizerContract, Picky(), "test_codes_are_what_the_layout_says")


def test_a_grid_of_another_kind_brings_its_own_bound() -> None:
    """Symmetric about 0: half a step is what the largest number makes it."""

    @attrs.frozen
    class Signs(Quantizer):
        name = "signs"

        @property
        def bits(self) -> int:
            return 1

        @property
        def min_snr_db(self) -> float:
            return 0.0

        def layout(self, window_tokens: int, head_dim: int) -> Layout:
            return {"sign": ArraySpec((window_tokens, head_dim), torch.int8), "most": ArraySpec((), torch.float32)}

        def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
            return {"sign": torch.where(x.float() < 0, -1, 1).to(torch.int8), "most": x.float().abs().amax((-1, -2))}

        def decode(self, codes: Codes, head_dim: int) -> Tensor:
            return codes["sign"].float() * codes["most"][..., None, None]

    class SignsContract(QuantizerContract):
        def error_bound(self, x: Tensor) -> Tensor:
            return x.abs().amax((-1, -2), keepdim=True)

    law = "test_the_error_is_at_most_half_a_step"
    report(QuantizerContract, Break(law, Signs()))
    passes(SignsContract, Signs(), law)
