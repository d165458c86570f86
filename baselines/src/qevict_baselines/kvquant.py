"""KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization (arXiv 2401.18079).

Non-uniform levels, one set for the keys of a layer and one for its values; keys before RoPE in ranges that are fixed by
channel, values in ranges that each token has; outliers are kept beside the codes.
"""

from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.quantizer import NOTHING_SHARED, Origin, Quantizer
from qevict.contracts.values import ArraySpec, Codes, Geometry, Layout
from qevict.errors import PolicyError
from qevict.policy import Policy
from qevict_baselines import nonuniform
from qevict_baselines.kvquant_calibration import BITS, Calibration, load, quantiles
from qevict_baselines.quantizing import quantizing


def _known_bits(_instance: object, _attribute: object, value: int) -> None:
    if value not in BITS or isinstance(value, bool):
        raise PolicyError(f"bits={value!r}: levels are non-uniform for {', '.join(map(str, BITS))} bits")


def _a_part(_instance: object, _attribute: object, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 0.5:
        raise PolicyError(f"outliers={value!r} must be a part of all numbers, from 0 to below 0.5, such as 0.01")


def _read(quantizer: "CalibratedKeys | CalibratedValues") -> Calibration:
    return load(quantizer.path)


def _check_model(calibration: Calibration, geometry: Geometry) -> None:
    made, wanted = tuple(calibration.key_low.shape), (geometry.layers, geometry.kv_heads, geometry.head_dim)
    if made != wanted:
        raise PolicyError(
            f"the calibration is for {calibration.model or 'a model'} with (layers, KV heads, channels) {made}; the "
            f"policy rules {wanted} of this one; calibrate this model by python -m qevict_baselines.kvquant_calibrate"
        )


@attrs.frozen
class CalibratedKeys(Quantizer):
    """KVQuant's keys: ranges by channel and levels by layer, both calibrated beforehand.

    Faithful: pre-RoPE keys, thresholds and Fisher-weighted levels of the calibration; what lies beyond a threshold is
    kept at 16 bits. Differs: the paper keeps whatever lies beyond (1 % on average); here each window of a head has room
    for ``outliers`` of its numbers, those farthest out, and others are put to the range's end; room that is left keeps
    the numbers next to the ends. Levels and thresholds have 16 bits, as in the authors' code.

    Args:
        path: a file of ``python -m qevict_baselines.kvquant_calibrate``.
        outliers: part of a window's numbers that has room beside the codes.

    Bytes per window and KV head: ``window * head_dim * bits / 8 + 4 * outliers * window * head_dim``, the latter
    rounded up to whole numbers; and ``4 * head_dim + 2 * 2^bits`` once per KV head of a row.
    """

    name: ClassVar[str] = "kvquant_keys"
    keeps_constants: ClassVar[bool] = False
    path: str
    outliers: float = attrs.field(default=0.01, validator=_a_part)
    calibration: Calibration = attrs.field(init=False, repr=False, default=attrs.Factory(_read, takes_self=True))

    @property
    def bits(self) -> int:
        return self.calibration.bits

    @property
    def min_snr_db(self) -> float:
        """Nothing is promised of numbers that the calibration has not seen."""
        return 0.0

    def check(self, geometry: Geometry) -> None:
        _check_model(self.calibration, geometry)

    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        return nonuniform.window_layout(self, self.outliers, window_tokens, head_dim, ())

    def shared_layout(self, head_dim: int) -> Layout:
        return _ranges_and_levels(self.bits, head_dim)

    def fit(self, x: Tensor, origin: Origin) -> Codes:
        own, heads = self.calibration, list(origin.heads)
        low, high = nonuniform.as_range(own.key_low[origin.layer, heads], own.key_high[origin.layer, heads])
        shared = {"low": low, "high": high, "levels": _by_head(own.key_levels[origin.layer], len(heads))}
        return {name: array.to(x.device) for name, array in shared.items()}

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        return _encode_keys(x, shared, self.bits, self.outliers)

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        return _decode_keys(codes, self.bits, head_dim)


@attrs.frozen
class CalibratedValues(Quantizer):
    """KVQuant's values: each token has its range, without outliers; levels are calibrated by layer.

    Faithful: ranges online, from what the outliers leave. Differs: ranges are by token and KV head, since heads are
    encoded apart, and the paper's by token over all heads; outliers are so many of each window, those farthest from
    their token's median, and not those beyond two quantiles of each token.

    Args:
        path: as of :class:`CalibratedKeys`.
        outliers: part of a window's numbers that is kept beside the codes.

    Bytes per window and KV head: those of :class:`CalibratedKeys`, and 4 for each token; ``2 * 2^bits`` once per KV
    head of a row.
    """

    name: ClassVar[str] = "kvquant_values"
    keeps_constants: ClassVar[bool] = False
    path: str
    outliers: float = attrs.field(default=0.01, validator=_a_part)
    calibration: Calibration = attrs.field(init=False, repr=False, default=attrs.Factory(_read, takes_self=True))

    @property
    def bits(self) -> int:
        return self.calibration.bits

    @property
    def min_snr_db(self) -> float:
        """Nothing is promised of numbers that the calibration has not seen."""
        return 0.0

    def check(self, geometry: Geometry) -> None:
        _check_model(self.calibration, geometry)

    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        return nonuniform.window_layout(self, self.outliers, window_tokens, head_dim, ("low", "high"))

    def shared_layout(self, head_dim: int) -> Layout:
        return {"levels": ArraySpec((2**self.bits,), torch.float16)}

    def fit(self, x: Tensor, origin: Origin) -> Codes:
        levels = self.calibration.value_levels[origin.layer]
        return {"levels": _by_head(levels, len(origin.heads)).to(x.device)}

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        return _encode_values(x, shared, self.bits, self.outliers)

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        return _decode_values(codes, self.bits, head_dim)


@attrs.frozen
class FittedKeys(Quantizer):
    """Keys as KVQuant's, without a calibration: ranges from what is encoded first, levels for normal numbers.

    Not the paper's: a fallback for models that were not calibrated. The ranges of a channel end where half of the
    outliers lies beyond either end, over the windows that a tier encodes first.

    Args:
        bits: 2, 3 (default) or 4.
        outliers: part of a window's numbers that has room beside the codes.

    Bytes per window and KV head: as of :class:`CalibratedKeys`; ``4 * head_dim`` once per KV head of a row.
    """

    name: ClassVar[str] = "nuq_keys"
    keeps_constants: ClassVar[bool] = False
    bits: int = attrs.field(default=3, validator=_known_bits)
    outliers: float = attrs.field(default=0.01, validator=_a_part)

    @property
    def min_snr_db(self) -> float:
        """Of windows that the ranges were fitted to."""
        return nonuniform.NORMAL_DB[self.bits]

    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        return nonuniform.window_layout(self, self.outliers, window_tokens, head_dim, ())

    def shared_layout(self, head_dim: int) -> Layout:
        ends = ArraySpec((head_dim,), torch.float16)
        return {"low": ends, "high": ends}

    def fit(self, x: Tensor, origin: Origin) -> Codes:
        low, high = nonuniform.as_range(*quantiles(x.float().flatten(1, 2), 1, self.outliers))
        return {"low": low, "high": high}

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        return _encode_keys(x, _with_normal_levels(shared, x.shape[:2], self.bits, x.device), self.bits, self.outliers)

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        packed = codes["codes"]
        return _decode_keys(_with_normal_levels(codes, packed.shape[:2], self.bits, packed.device), self.bits, head_dim)


@attrs.frozen
class FittedValues(Quantizer):
    """Values as KVQuant's, without a calibration: levels for normal numbers in the range of each token.

    Not the paper's: a fallback for models that were not calibrated.

    Args:
        bits: 2, 3 (default) or 4.
        outliers: part of a window's numbers that is kept beside the codes.

    Bytes per window and KV head: as of :class:`CalibratedValues`; nothing besides.
    """

    name: ClassVar[str] = "nuq_values"
    keeps_constants: ClassVar[bool] = False
    bits: int = attrs.field(default=3, validator=_known_bits)
    outliers: float = attrs.field(default=0.01, validator=_a_part)

    @property
    def min_snr_db(self) -> float:
        """Of normal numbers."""
        return nonuniform.NORMAL_DB[self.bits]

    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        return nonuniform.window_layout(self, self.outliers, window_tokens, head_dim, ("low", "high"))

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        own = _with_normal_levels(shared, x.shape[:2], self.bits, x.device)
        return _encode_values(x, own, self.bits, self.outliers)

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        packed = codes["codes"]
        own = _with_normal_levels(codes, packed.shape[:2], self.bits, packed.device)
        return _decode_values(own, self.bits, head_dim)


def kvquant(calibration: str, *, outliers: float = 0.01, dtype: torch.dtype | None = None) -> Policy:
    """KVQuant, every token kept: non-uniform levels of 2, 3 or 4 bits and sparse outliers, calibrated.

    Differs, besides what the quantizers say: tokens become codes in windows of 8 instead of one by one, so that up to
    8 of the last tokens are in full precision; the first token is, as in the authors' checkpoints. Q-Norm is not there.

    Args:
        calibration: a file of ``python -m qevict_baselines.kvquant_calibrate``, which decides about the bits.
        outliers: the paper's 1 %.
        dtype: dtype in which full precision is stored; None for the model's.

    Bytes per token and KV head of 64 channels: 58 for 3 bits, 42 for 2, 74 for 4 (256 in full precision of 16
    bits), and ``256 + 4 * 2^bits`` once per KV head of a row.
    """
    keys, values = CalibratedKeys(calibration, outliers), CalibratedValues(calibration, outliers)
    return quantizing(f"nuq{keys.bits}", keys, values, sink_tokens=1, recent_tokens=0, dtype=dtype)


def nuq(*, bits: int = 3, outliers: float = 0.01, dtype: torch.dtype | None = None) -> Policy:
    """KVQuant's form without its calibration, every token kept: ranges from the prompt, levels for normal numbers.

    A fallback, which no paper has.

    Args:
        bits: 2, 3 (default) or 4.
        outliers: part of the numbers kept beside the codes.
        dtype: dtype in which full precision is stored; None for the model's.

    Bytes per token and KV head of 64 channels: 58 for 3 bits, 42 for 2, 74 for 4 (256 in full precision of 16
    bits), and 256 once per KV head of a row.
    """
    keys, values = FittedKeys(bits, outliers), FittedValues(bits, outliers)
    return quantizing(f"nuq{bits}", keys, values, sink_tokens=1, recent_tokens=0, dtype=dtype)


def _ranges_and_levels(bits: int, head_dim: int) -> Layout:
    ends = ArraySpec((head_dim,), torch.float16)
    return {"low": ends, "high": ends, "levels": ArraySpec((2**bits,), torch.float16)}


def _by_head(levels: Tensor, heads: int) -> Tensor:
    return levels.half().expand(heads, -1)


def _with_normal_levels(arrays: Codes, leading: torch.Size, bits: int, device: torch.device) -> Codes:
    return {**arrays, "levels": nonuniform.normal_levels(bits).to(device).expand(*leading, -1)}


def _encode_keys(x: Tensor, shared: Codes, bits: int, outliers: float) -> Codes:
    low, high = (shared[name].float().unsqueeze(2) for name in ("low", "high"))
    x = x.float()
    places = nonuniform.outlying(x, low, high, outliers)
    return nonuniform.encoded(x, low, high, shared["levels"], bits, places)


def _decode_keys(codes: Codes, bits: int, head_dim: int) -> Tensor:
    low, high = (codes[name].float().unsqueeze(2) for name in ("low", "high"))
    return nonuniform.decoded(codes, low, high, codes["levels"], bits, head_dim)


def _encode_values(x: Tensor, shared: Codes, bits: int, outliers: float) -> Codes:
    x = x.float()
    places, low, high = nonuniform.token_ranges(x, outliers)
    ends = low.float().unsqueeze(-1), high.float().unsqueeze(-1)
    return {**nonuniform.encoded(x, *ends, shared["levels"], bits, places), "low": low, "high": high}


def _decode_values(codes: Codes, bits: int, head_dim: int) -> Tensor:
    low, high = (codes[name].float().unsqueeze(-1) for name in ("low", "high"))
    return nonuniform.decoded(codes, low, high, codes["levels"], bits, head_dim)
