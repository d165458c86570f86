"""The laws of a quantizer."""

import contextlib
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from qevict.contracts.quantizer import Origin, Quantizer, for_windows
from qevict.contracts.values import Codes, Layout, layout_bytes
from qevict.errors import PolicyError
from qevict.testing.contract import RegisteredContract, declares, law, plain_law
from qevict.testing.operators import Operators
from qevict.testing.pairs import plainly_read
from qevict.testing.quantizing import SHAPES, QuantizerCase
from qevict.testing.values import close, copied, gap, normal, require, same_bits, same_values

_ROUNDING = 2.0**-22
"""What a few operations in fp32 may add to an error, relative to the largest number."""


class QuantizerContract(RegisteredContract[Quantizer, QuantizerCase]):
    """The laws of a quantizer. One line makes them tests of yours.

    Windows are drawn among the ``shapes`` that the quantizer's ``layout`` accepts.

    Attributes:
        shapes: window tokens and channels to try; give your own where none of the usual ones is accepted.

    Example:
        ```python
        from qevict.quantizers.affine import PerChannel
        from qevict.testing import QuantizerContract


        class TestPerChannel(QuantizerContract):
            part = PerChannel(bits=4)
        ```
    """

    kind: ClassVar[type] = Quantizer
    examples: ClassVar[int] = 25
    shapes: ClassVar[Sequence[tuple[int, int]]] = SHAPES

    def cases(self) -> SearchStrategy[QuantizerCase]:
        """Numbers of any magnitude that 16 bits hold, in the shapes that ``layout`` accepts."""
        return st.sampled_from(self._accepted()).flatmap(
            lambda shape: st.builds(
                QuantizerCase,
                window_tokens=st.just(shape[0]),
                head_dim=st.just(shape[1]),
                heads=st.integers(1, 2),
                windows=st.integers(1, 3),
                offset=st.sampled_from([0.0, -1.0, 60.0, -45.0, 3e-5, 1e4, -1e4]),
                spread=st.sampled_from([0.0, 1.0, 30.0, 1e-2, 1e-4, 1e-7, 5e3]),
                dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
                seed=st.integers(0, 1000),
            )
        )

    def error_bound(self, x: Tensor) -> Tensor:
        """The error that is allowed: half a step of the widest grid that outward rounding may store.

        The grid is taken to have ``2^bits`` levels at equal distances over the range of the window's numbers. Override
        this for a grid of another kind, such as a codebook or one that is symmetric about 0.

        Args:
            x: what is encoded, ``[heads, windows, window, head_dim]`` in fp64.
        """
        low, high = x.amin((-1, -2), keepdim=True), x.amax((-1, -2), keepdim=True)
        coarse, tiny = self._parameters(x.shape[2], x.shape[3])
        fuzz = _ROUNDING * torch.maximum(low.abs(), high.abs())
        step = (high - low + coarse * low.abs() + tiny + fuzz) / (2**self.part.bits - 1) * (1 + 2 * coarse) + 2 * tiny
        bound: Tensor = step / 2 + fuzz + _ROUNDING * step
        return bound

    @plain_law("layout refuses windows that cannot be encoded with a PolicyError.")
    def test_the_layout_refuses_politely(self) -> None:
        for window_tokens, head_dim in [*self.shapes, *SHAPES]:
            with contextlib.suppress(PolicyError):
                self.part.layout(window_tokens, head_dim)

    @plain_law("layout has room for a code of `bits` bits for every number of a window.")
    def test_the_layout_has_room_for_every_code(self) -> None:
        bits = self.part.bits
        for window_tokens, head_dim in self._accepted():
            needed, told = bits * window_tokens * head_dim, 8 * layout_bytes(self.part.layout(window_tokens, head_dim))
            finding = f"{window_tokens} x {head_dim} codes of {bits} bits need {needed} bits, layout has {told}"
            require(needed <= told, finding)

    @law("decode rebuilds, in fp32, the windows that layout accepts.")
    def test_it_rebuilds_what_its_layout_accepts(self, case: QuantizerCase) -> None:
        x = self._numbers(case)
        decoded = self._back(x)
        require(decoded.shape == x.shape, f"{tuple(x.shape)} came back as {tuple(decoded.shape)}")
        require(decoded.dtype == torch.float32, f"decode gave {decoded.dtype}; it rebuilds in fp32")

    @law("The arrays of a code are those of layout, so bytes are exact before anything is encoded.")
    def test_codes_are_what_the_layout_says(self, case: QuantizerCase) -> None:
        x, layout = self._numbers(case), self._layout(case)
        codes = self.part.encode(x, self._shared(x))
        _check_arrays(codes, layout, (case.heads, case.windows), "layout", "encode")
        stored = sum(array.clone().contiguous().untyped_storage().nbytes() for array in codes.values())
        told = case.heads * case.windows * sum(math.prod(each.shape) * each.dtype.itemsize for each in layout.values())
        require(stored == told, f"the codes take {stored} bytes, layout says {told}")

    @law("What fit gives are the arrays of shared_layout, none of which is one of layout.")
    def test_what_is_shared_is_what_the_layout_says(self, case: QuantizerCase) -> None:
        x, layout = self._numbers(case), self.part.shared_layout(case.head_dim)
        _check_arrays(self.part.fit(x, _origin(x)), layout, (case.heads,), "shared_layout", "fit")
        both = layout.keys() & self._layout(case).keys()
        require(not both, f"{sorted(both)} are shared, and belong to each window as well")

    @law("What a KV head's windows share depends on that head alone.")
    def test_heads_are_fitted_apart(self, case: QuantizerCase) -> None:
        x = self._numbers(case)
        x = torch.cat((x, (-0.5 * x.float()).to(x.dtype)), dim=0)
        together = self.part.fit(x, _origin(x))
        for head in range(x.shape[0]):
            alone = self.part.fit(x[head : head + 1], Origin(0, (head,)))
            among = {name: array[head : head + 1] for name, array in together.items()}
            require(same_values(alone, among), f"alone, the windows of head {head} share other numbers")

    @law("Codes that claim to be paired are: read as that layout says, they give what decode gives.")
    def test_paired_codes_are_what_their_layout_says(self, case: QuantizerCase) -> None:
        layout, x = self.part.paired, self._numbers(case)
        if layout is None:
            return
        own = {"channel_scale", "mean"} & {*layout.undone} - self.part.shared_layout(case.head_dim).keys()
        require(not own, f"{sorted(own)} belong to the sequence, and to shared_layout")
        codes = self._codes(x)
        read = plainly_read(layout, codes, case.window_tokens, case.head_dim)
        decoded = self.part.decode(codes, case.head_dim).double()
        require(
            close(decoded, read, 1e-5 * max(1.0, float(read.abs().max()))), f"read bit by bit: {gap(decoded, read)}"
        )

    @law("decode is a function of the codes alone, bit-identical each time.")
    def test_decoding_is_a_function_of_the_codes_alone(self, case: QuantizerCase) -> None:
        """Again, from copies, by an equal quantizer, and after something else was encoded."""
        twin, codes = self.twin(), self._codes(self._numbers(case))
        first, copies = self.part.decode(codes, case.head_dim).clone(), copied(codes)
        self._codes(3 * self._numbers(case) + 1)
        require(same_values(codes, copies), "decode, or a later encode, changed the codes")
        again = self.part.decode(codes, case.head_dim)
        require(same_bits(again, first), f"decoding the same codes again gave other numbers: {gap(again, first)}")
        other = twin.decode(copies, case.head_dim)
        require(same_bits(other, first), f"an equal quantizer decodes otherwise: {gap(other, first)}")

    @law("|decode(encode(x)) - x| is at most half a step of the stored grid; a grid is never shifted off the data.")
    def test_the_error_is_at_most_half_a_step(self, case: QuantizerCase) -> None:
        x = self._numbers(case)
        decoded = self._back(x)
        error, bound = (decoded.double() - x.double()).abs().cpu(), self.error_bound(x.double().cpu())
        excess = (error - bound).nan_to_num(nan=torch.inf)
        worst = int(excess.argmax())
        finding = f"{float(x.flatten()[worst]):.7g} came back as {float(decoded.flatten()[worst]):.7g}"
        allowed = float(bound.expand_as(error).flatten()[worst])
        require(excess.max() <= 0, f"{finding}; an error of {allowed:.3g} is allowed")

    @law(
        "A window that is constant, and representable in the parameters' dtype, comes back exactly.",
        given_that=declares("keeps_constants"),
    )
    def test_a_constant_comes_back_exactly(self, case: QuantizerCase) -> None:
        """A window of one small number, beside others."""
        x = self._numbers(case).float()
        constant = (case.seed % 257 - 128) / 4 if case.seed % 3 else 0.0
        x[:, 0] = constant
        back = self._back(x)[:, 0]
        off = gap(back, torch.full_like(back, constant))
        require((back == constant).all(), f"a window of {constant} everywhere came back otherwise: {off}")

    @law("Windows and heads are encoded apart: encoding them together or one by one gives the same codes.")
    def test_windows_and_heads_are_encoded_apart(self, case: QuantizerCase) -> None:
        x = self._numbers(case)
        x = torch.cat((x, (100 * x.float() + 1).clamp(-6e4, 6e4).to(x.dtype)), dim=1)
        x = torch.cat((x, (-0.5 * x.float()).to(x.dtype)), dim=0)
        shared = self._shared(x)
        codes = self.part.encode(x, shared)
        for window in range(x.shape[1]):
            head = window % x.shape[0]
            alone = self.part.encode(x[head : head + 1, window : window + 1], _one(shared, head, window))
            among = _one(codes, head, window)
            require(same_values(alone, among), f"alone, window {window} of head {head} has other codes")

    @law("encode computes in fp32, and leaves its input alone.")
    def test_encoding_computes_in_fp32(self, case: QuantizerCase) -> None:
        x = self._numbers(case)
        before = x.clone()
        codes = self._codes(x)
        require(same_bits(x, before), "encode changed its input")
        wanted = self._codes(before.float())
        require(same_values(codes, wanted), f"the same numbers have other codes in {case.dtype} than in fp32")

    @law("min_snr_db is the signal-to-noise ratio that standard normal input is promised.")
    def test_the_promised_signal_to_noise_ratio_is_kept(self, case: QuantizerCase) -> None:
        windows = 1 + 8192 // (case.window_tokens * case.head_dim)
        x = normal(case.seed, 1, windows, case.window_tokens, case.head_dim).to(self.device)
        noise = (self._back(x) - x).double()
        snr_db = 10 * math.log10(float(x.double().square().mean()) / max(float(noise.square().mean()), 1e-30))
        promised = self.part.min_snr_db
        require(snr_db >= promised - 0.2, f"{promised:.2f} dB are promised, {snr_db:.2f} dB were measured")

    @law("Encoding a decoded window again gives the same codes.", given_that=declares("idempotent"))
    def test_encoding_again_gives_the_same_codes(self, case: QuantizerCase) -> None:
        x = self._numbers(case)
        shared, codes = self._shared(x), self._codes(x)
        again = self.part.encode(self.part.decode(codes, case.head_dim), shared)
        for name, array in self.part.encode(x, shared).items():
            require(same_bits(again[name], array), f"{name!r} differs at the second time: {gap(again[name], array)}")

    @law("No host synchronisation: steps between events decode.")
    def test_the_host_never_waits(self, case: QuantizerCase) -> None:
        x = self._numbers(case)
        with Operators() as operators:
            self._back(x)
        require(not operators.waits, f"it waits for the device: {', '.join(sorted(operators.waits))}")

    def _shared(self, x: Tensor) -> Codes:
        """What the windows share, if they are all of one row."""
        return for_windows(self.part.fit(x, _origin(x)), x.shape[1])

    def _codes(self, x: Tensor) -> Codes:
        """Everything that decode is given of windows that are all of one row."""
        shared = self._shared(x)
        return {**self.part.encode(x, shared), **shared}

    def _back(self, x: Tensor) -> Tensor:
        """What becomes of numbers that are encoded and decoded."""
        return self.part.decode(self._codes(x), x.shape[3])

    def _numbers(self, case: QuantizerCase) -> Tensor:
        return case.numbers().to(self.device)

    def _layout(self, case: QuantizerCase) -> Layout:
        return self.part.layout(case.window_tokens, case.head_dim)

    def _accepted(self) -> list[tuple[int, int]]:
        accepted, reasons = [], []
        for shape in self.shapes:
            try:
                self.part.layout(*shape)
                accepted.append(shape)
            except PolicyError as error:
                reasons.append(f"{shape}: {error}")
        if not accepted:
            raise ValueError(
                f"{self.part!r} accepts none of the windows tried; set `shapes` (window tokens, channels) in "
                f"{type(self).__name__} to some that it accepts. It said: {'; '.join(reasons)}"
            )
        return accepted

    def _parameters(self, window_tokens: int, head_dim: int) -> tuple[float, float]:
        """What the coarsest float dtype among the arrays resolves: relative to a number, and next to 0."""
        layout = self.part.layout(window_tokens, head_dim)
        floats = [torch.finfo(spec.dtype) for spec in layout.values() if spec.dtype.is_floating_point]
        coarse = max((each.eps for each in floats), default=_ROUNDING)
        return coarse, max((each.tiny * each.eps for each in floats), default=0.0)


def _origin(x: Tensor) -> Origin:
    return Origin(0, tuple(range(x.shape[0])))


def _one(arrays: Codes, head: int, window: int) -> Codes:
    """One window of one head."""
    return {name: array[head : head + 1, window : window + 1] for name, array in arrays.items()}


def _check_arrays(given: Codes, layout: Layout, leading: tuple[int, ...], says: str, gave: str) -> None:
    """Arrays have the names, shapes and dtypes of a layout."""
    require(given.keys() == layout.keys(), f"{says} names {sorted(layout)}, {gave} gave {sorted(given)}")
    for name, spec in layout.items():
        shape, wanted = tuple(given[name].shape), (*leading, *spec.shape)
        require(given[name].dtype == spec.dtype, f"{name!r} is {given[name].dtype}, {says} says {spec.dtype}")
        require(shape == wanted, f"{name!r} has shape {shape}, {says} says {wanted}")
