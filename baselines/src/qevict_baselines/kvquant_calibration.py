"""What KVQuant calibrates beforehand, and how: ranges of the keys' channels, and levels for keys and for values.

KVQuant: Hooper et al., Towards 10 Million Context Length LLM Inference with KV Cache Quantization (arXiv 2401.18079),
and the authors' code. ``python -m qevict_baselines.kvquant_calibrate`` runs a model and writes the file.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from jaxtyping import Float, Float32
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qevict.errors import PolicyError

BITS = (2, 3, 4)
"""What codes can have."""

_TENSORS = {
    "key_low": "keys.low",
    "key_high": "keys.high",
    "key_levels": "keys.levels",
    "value_levels": "values.levels",
}
_NUMBERS = {"bits": int, "outliers": float, "samples": int, "tokens": int}
_BINS = 512
"""Levels are fitted to a histogram of [-1, 1]; no border between two of them is off by more than 2 / 512."""


def _digest(calibration: "Calibration") -> str:
    """Of what decides about codes."""
    digest = hashlib.sha256()
    for name in _TENSORS:
        array = getattr(calibration, name)
        digest.update(f"{name}{tuple(array.shape)}".encode() + array.contiguous().numpy().tobytes())
    return digest.hexdigest()


@attrs.frozen
class Calibration:
    """Ranges and levels of one model; two with the same numbers are equal.

    Attributes:
        key_low: lower end of each channel of the keys before RoPE; what lies below is an outlier.
        key_high: its upper end, above the lower one.
        key_levels: by layer, ``2^bits`` ascending numbers in [-1, 1] for keys whose range was stretched to that.
        value_levels: likewise for values.
        bits: of one code.
        outliers: the part of all numbers that lies outside of their ranges.
        model: what it was calibrated for.
        samples: how many texts were read.
        tokens: how long each was.
        digest: of the numbers.

    Raises:
        PolicyError: the numbers cannot be ranges and levels.
    """

    key_low: Float32[Tensor, "layers kv_heads head_dim"] = attrs.field(eq=False, repr=False)
    key_high: Float32[Tensor, "layers kv_heads head_dim"] = attrs.field(eq=False, repr=False)
    key_levels: Float32[Tensor, "layers levels"] = attrs.field(eq=False, repr=False)
    value_levels: Float32[Tensor, "layers levels"] = attrs.field(eq=False, repr=False)
    bits: int
    outliers: float = attrs.field(default=0.01, eq=False)
    model: str = attrs.field(default="", eq=False)
    samples: int = attrs.field(default=0, eq=False)
    tokens: int = attrs.field(default=0, eq=False)
    digest: str = attrs.field(init=False, repr=False, default=attrs.Factory(_digest, takes_self=True))

    def __attrs_post_init__(self) -> None:
        problem = next(filter(None, (check(self) for check in _CHECKS)), None)
        if problem:
            msg = f"this is no calibration: {problem}; make one with python -m qevict_baselines.kvquant_calibrate"
            raise PolicyError(msg)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; what is not a tensor stands in its metadata, as text.

        Raises:
            OSError: the file cannot be written.
        """
        tensors = {
            name: getattr(self, field).clone(memory_format=torch.contiguous_format) for field, name in _TENSORS.items()
        }
        words = {name: str(getattr(self, name)) for name in (*_NUMBERS, "model")}
        save_file(tensors, path, metadata=words)


def load(path: str | os.PathLike[str]) -> Calibration:
    """Read what :meth:`Calibration.save` wrote.

    Raises:
        PolicyError: the file cannot be read, or holds something else.
    """
    name = os.fspath(path)
    try:
        with safe_open(name, framework="pt") as file:
            words: Mapping[str, str] = file.metadata() or {}
            tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError) as error:
        msg = f"cannot read the calibration {name!r}: {error}; write one with qevict_baselines.kvquant_calibrate"
        raise PolicyError(msg) from error
    wanted = [*_TENSORS.values(), *_NUMBERS, "model"]
    if missing := [each for each in wanted if each not in tensors and each not in words]:
        msg = f"{name!r} is no calibration: it lacks {', '.join(missing)}; write one with kvquant_calibrate"
        raise PolicyError(msg)
    try:
        numbers: dict[str, Any] = {each: kind(words[each]) for each, kind in _NUMBERS.items()}
    except ValueError as error:
        msg = f"{name!r} is no calibration: in its metadata, {error}"
        raise PolicyError(msg) from error
    return Calibration(**{field: tensors[each] for field, each in _TENSORS.items()}, **numbers, model=words["model"])


def _odd_bits(calibration: Calibration) -> str | None:
    return None if calibration.bits in BITS else f"codes have 2, 3 or 4 bits, not {calibration.bits!r}"


def _odd_outliers(calibration: Calibration) -> str | None:
    part = calibration.outliers
    return None if 0 <= part < 1 else f"outliers are a part of all numbers, from 0 to below 1, not {part!r}"


def _odd_numbers(calibration: Calibration) -> str | None:
    for name in _TENSORS:
        array = getattr(calibration, name)
        if not isinstance(array, Tensor) or array.dtype != torch.float32 or not bool(array.isfinite().all()):
            return f"{name} must hold finite numbers in fp32"
    return None


def _odd_shapes(calibration: Calibration) -> str | None:
    low, high, levels = calibration.key_low, calibration.key_high, (calibration.key_levels, calibration.value_levels)
    if low.ndim != 3 or low.shape != high.shape or not low.numel():
        return f"ranges are [layers, kv_heads, head_dim], got {tuple(low.shape)} and {tuple(high.shape)}"
    wanted = (low.shape[0], 2**calibration.bits)
    if any(tuple(each.shape) != wanted for each in levels):
        return f"levels are [layers, 2^bits] = {wanted}, got {' and '.join(str(tuple(each.shape)) for each in levels)}"
    return None


def _odd_order(calibration: Calibration) -> str | None:
    if not bool((calibration.key_low < calibration.key_high).all()):
        return "the lower end of a range must lie below the upper one"
    for levels in (calibration.key_levels, calibration.value_levels):
        if not bool((levels.diff() > 0).all()) or float(levels.abs().max()) > 1:
            return "the levels of a layer ascend, from -1 to 1 at most"
    return None


# In this order: what a later check reads is sound once the earlier ones have passed.
_CHECKS = (_odd_bits, _odd_outliers, _odd_numbers, _odd_shapes, _odd_order)


@attrs.frozen(eq=False)
class Shown:
    """Some tokens of one layer, in fp32.

    Attributes:
        keys: before RoPE.
        values: likewise.
        key_weights: how much each number matters: the squared derivative of the loss, the diagonal of the Fisher
            information.
        value_weights: likewise.
    """

    keys: Float32[Tensor, "tokens kv_heads head_dim"]
    values: Float32[Tensor, "tokens kv_heads head_dim"]
    key_weights: Float32[Tensor, "tokens kv_heads head_dim"]
    value_weights: Float32[Tensor, "tokens kv_heads head_dim"]

    def some(self, tokens: Tensor) -> "Shown":
        """Some of the tokens."""
        return Shown(*(getattr(self, field.name)[tokens] for field in attrs.fields(Shown)))


def joined(parts: Sequence[Shown]) -> Shown:
    """The tokens of several texts."""
    return Shown(*(torch.cat([getattr(part, field.name) for part in parts]) for field in attrs.fields(Shown)))


def calibrated(layers: Sequence[Shown], bits: int, outliers: float, **made: Any) -> Calibration:  # noqa: ANN401 - fields
    """Ranges and levels of a model.

    As in the paper: the ranges of a channel's keys end where half of the outliers lies beyond either end; a layer has
    one set of levels for its keys and one for its values, which minimise the weighted squared error of the numbers
    within their ranges. Differs: values get their range by token and KV head, because heads are encoded apart, and not
    by token; levels are the best of all for a histogram, not what k-means finds from a random start.

    Args:
        layers: of which some tokens were seen.
        bits: of one code.
        outliers: part of the numbers that lies outside of their ranges.
        made: the fields of a calibration that say how it was made.
    """
    ranges = [quantiles(layer.keys, 0, outliers) for layer in layers]
    lows, highs = (torch.stack(ends) for ends in zip(*(wide(*ends) for ends in ranges), strict=True))
    return Calibration(
        lows,
        highs,
        torch.stack([key_levels(*each, bits) for each in zip(layers, lows, highs, strict=True)]),
        torch.stack([value_levels(layer, bits, outliers) for layer in layers]),
        bits,
        outliers,
        **made,
    )


def quantiles(numbers: Tensor, dim: int, outliers: float) -> tuple[Tensor, Tensor]:
    """What half of the outliers lies below, and half above, between the two numbers that each falls between."""
    ordered, last = numbers.sort(dim=dim).values, numbers.shape[dim] - 1
    found = []
    for part in (outliers / 2, 1 - outliers / 2):
        below = int(part * last)
        ends = ordered.select(dim, below), ordered.select(dim, min(below + 1, last))
        found.append(torch.lerp(*ends, part * last - below))
    return found[0], found[1]


def wide(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges that are none, those of constant numbers, made wide enough to be divided by."""
    least = low.abs().clamp(min=1) * 1e-3
    return low, torch.where(high - low < least * 1e-3, low + least, high)


def key_levels(layer: Shown, low: Tensor, high: Tensor, bits: int) -> Float[Tensor, " levels"]:
    """Levels of a layer's keys, each in the range of its channel."""
    return _levels_within(layer.keys, layer.key_weights, low, high, bits)


def value_levels(layer: Shown, bits: int, outliers: float) -> Float[Tensor, " levels"]:
    """Levels of a layer's values, each in the range of what its token and KV head leave without the outliers."""
    lower, upper = (ends[..., None] for ends in quantiles(layer.values, -1, outliers))
    beyond = (layer.values <= lower) | (layer.values >= upper)
    low = layer.values.masked_fill(beyond, torch.inf).amin(-1, keepdim=True)
    high = layer.values.masked_fill(beyond, -torch.inf).amax(-1, keepdim=True)
    return _levels_within(layer.values, layer.value_weights, low, high, bits)


def _levels_within(numbers: Tensor, weights: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Levels for the numbers inside of ranges, which are stretched to [-1, 1]."""
    stretched = (numbers - (high + low) / 2) / (high - low).clamp(min=torch.finfo(torch.float32).tiny) * 2
    inside = (numbers >= low) & (numbers <= high)
    return best_levels(stretched[inside], weights[inside], 2**bits)


def best_levels(numbers: Float[Tensor, " n"], weights: Float[Tensor, " n"], count: int) -> Float32[Tensor, " levels"]:
    """Ascending levels in [-1, 1] that minimise the weighted squared distance of each number to its nearest one.

    The paper's sensitivity-weighted k-means in one dimension, where clusters are stretches of the line: the best of all
    ways to cut a histogram into stretches, by dynamic programming.
    """
    sums = _summed(numbers.double(), weights.double())
    span = sums[:, None, :] - sums[:, :, None]  # from a border, to a border
    cost = (span[2] - span[1].square() / span[0]).clamp(min=0)
    cost = torch.where(span[0] > 0, cost, torch.inf)
    least, cuts = cost[0], []
    for _ in range(count - 1):
        least, cut = (least[:, None] + cost).min(dim=0)
        cuts.append(cut)
    borders = [sums.shape[1] - 1]
    for cut in reversed(cuts):
        borders.append(int(cut[borders[-1]]))
    ends = sums[:, [0, *reversed(borders)]].diff()
    return (ends[1] / ends[0]).float()


def _summed(numbers: Tensor, weights: Tensor) -> Tensor:
    """Weights, and weighted numbers and squares, of all bins up to each border; a trace of weight fills empty bins."""
    where = ((numbers + 1) * (_BINS / 2)).long().clamp(0, _BINS - 1)
    sums = torch.stack([torch.bincount(where, weights * numbers**power, _BINS) for power in range(3)]).double()
    centres = (torch.arange(_BINS, dtype=torch.float64) + 0.5) * (2 / _BINS) - 1
    trace = sums[0].sum().clamp(min=torch.finfo(torch.float64).tiny * _BINS) * 1e-9 / _BINS
    sums += trace * torch.stack([centres**power for power in range(3)])
    return torch.nn.functional.pad(sums.cumsum(dim=1), (1, 0))
