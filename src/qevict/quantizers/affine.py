"""Asymmetric min-max grids: KIVI's keys per channel and values per token, and what others added to them."""

import functools
from typing import ClassVar, Literal

import attrs
import torch
from torch import Tensor

from qevict.contracts.paired import PairedCodes
from qevict.contracts.quantizer import NOTHING_SHARED, Origin, Quantizer
from qevict.contracts.values import Codes, Layout
from qevict.errors import PolicyError
from qevict.quantizers.codec import Codec
from qevict.quantizers.groups import ByChannel, ByToken
from qevict.quantizers.levels import Levels, check, snr_db
from qevict.quantizers.packing import CODES_PER_GROUP
from qevict.quantizers.scales import PerSequence, Plain, Scales, SecondLevel
from qevict.quantizers.transforms import Centred, ChannelScaled, Normed, Rotated, Transform

_PARAMETER_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SCALE_BITS = (4, 8)
_SCOPES = ("window", "sequence")
_LONG_GROUP_DB = 3.0
"""What normal numbers lose where a group is a sequence of up to 100000 tokens instead of 1024 numbers."""


def _known_bits(_instance: object, _attribute: object, value: int) -> None:
    if not isinstance(value, int) or value not in CODES_PER_GROUP:
        msg = f"bits={value!r} cannot be packed; allowed: {', '.join(map(str, CODES_PER_GROUP))}"
        raise PolicyError(msg)


def _known_dtype(_instance: object, _attribute: object, value: torch.dtype) -> None:
    if value not in _PARAMETER_DTYPES:
        msg = f"scales cannot be stored as {value!r}; allowed: {', '.join(map(str, _PARAMETER_DTYPES))}"
        raise PolicyError(msg)


def _known_scale_bits(_instance: object, _attribute: object, value: int | None) -> None:
    if value is not None and value not in _SCALE_BITS:
        raise PolicyError(
            f"scale_bits={value!r} is unknown; allowed: {', '.join(map(str, _SCALE_BITS))}, or None for scales in the "
            "parameters' dtype"
        )


def _yes_or_no(_instance: object, attribute: "attrs.Attribute[bool]", value: object) -> None:
    if not isinstance(value, bool):
        raise PolicyError(f"{attribute.name} is True or False, got {value!r}")


def _known_scope(_instance: object, _attribute: object, value: str) -> None:
    if value not in _SCOPES:
        raise PolicyError(f"scope={value!r} is unknown; allowed: {', '.join(map(repr, _SCOPES))}")


def _known_levels(instance: "PerChannel | PerToken", _attribute: object, value: Levels) -> None:
    check(value, instance.bits)


def _known_group(_instance: object, _attribute: object, value: int | None) -> None:
    if value is not None and value < 1:
        raise PolicyError(
            f"group_channels={value!r} is no number of channels; give 1 or more, such as KIVI's 32, or None for all "
            "channels of a head"
        )


@attrs.frozen(cache_hash=True)  # backends look it up at every step
class PerChannel(Quantizer):
    """One grid per channel over the tokens of a window: the axis for keys, whose outliers keep to their channels.

    ``code = round((x - zero) / scale)`` with ``zero = min`` and ``scale = (max - min) / (2^bits - 1)`` over the group,
    both rounded outwards to the parameters' dtype, and codes computed against the stored grid. KIVI (arXiv 2402.02750),
    section 3; here the group is the window, as in QEvict (arXiv 2608.05326). Differs: KIVI and the QEvict authors round
    scale and zero to nearest, which lets data fall off the grid where an offset exceeds what the dtype resolves.

    What else is done to keys, each by itself or together, in this order: ``centred``, ``rotated``, ``normed``, then the
    grid, whose groups are those of what has become of the keys.

    Args:
        bits: 2 (default), 3, 4 or 8.
        parameters: dtype of scale and zero point; values beyond +-65504 need float32 or bfloat16.
        scope: whose statistics make the grid of a channel. Those of each window; or those of the sequence, fitted to
            what is encoded first, with later numbers that lie beyond put to the nearest end (ZipCache's keys, arXiv
            2405.14256).
        scale_bits: 4 or 8: scales and zero points are codes themselves, on one grid for all channels of a window; each
            group takes the neighbours on it that lose least. A number may then lie beyond the grid of its group, by at
            most what one step of scale or zero point makes. A window that is constant still comes back exactly, but not
            each channel that is. Wants ``centred`` where channels are far off, which makes that grid coarse.
        centred: the mean of each channel over the sequence is taken off first.
        rotated: channels are mixed by a Hadamard matrix, in blocks of the largest power of two that divides their
            number, which spreads what is far off over all of them.
        normed: each token is divided by its length, so that a token of small numbers is not rounded away beside others
            (OScaR, arXiv 2605.19660, where a length is taken over all heads and the keys are rotated ones).
        levels: ``"uniform"``, at equal distances; ``"normal"``, those of least mean squared error for normal numbers,
            stretched to the ends of the grid (2 to 4 bits); or a tuple of ``2^bits`` shares of the range from 0 to 1.
            The error is at most half of the widest gap between two.

    Bytes per window and KV head: ``head_dim * (window * bits / 8 + 2 * itemsize)``. With ``scale_bits``, the second
    summand is ``2 * head_dim * scale_bits / 8 + 4 * itemsize``; with ``scope="sequence"`` it is stored once per KV head
    of a row instead. ``normed`` adds ``window * itemsize``; ``centred`` adds ``head_dim * itemsize`` once.
    """

    name: ClassVar[str] = "per_channel"
    bits: int = attrs.field(default=2, validator=_known_bits)
    parameters: torch.dtype = attrs.field(default=torch.float16, validator=_known_dtype)
    scope: Literal["window", "sequence"] = attrs.field(default="window", validator=_known_scope, kw_only=True)
    scale_bits: int | None = attrs.field(default=None, validator=_known_scale_bits, kw_only=True)
    centred: bool = attrs.field(default=False, validator=_yes_or_no, kw_only=True)
    rotated: bool = attrs.field(default=False, validator=_yes_or_no, kw_only=True)
    normed: bool = attrs.field(default=False, validator=_yes_or_no, kw_only=True)
    levels: Levels = attrs.field(default="uniform", validator=_known_levels, kw_only=True)

    @property
    def paired(self) -> PairedCodes:
        """Codes of channel pairs, a grid per channel."""
        return self._codec.readable

    @property
    def keeps_constants(self) -> bool:
        """Nothing is done to numbers before the grid of their own window is laid over them."""
        return self._codec.keeps_constants

    @property
    def min_snr_db(self) -> float:
        """6 dB a bit, less what a min-max grid over few samples loses."""
        return snr_db(self.levels, self.bits) - (_LONG_GROUP_DB if self.scope == "sequence" else 0.0)

    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        """Codes channel by channel, and a scale and zero point per channel unless the sequence has them."""
        if window_tokens == 1 and self.scope == "window":
            msg = (
                "per_channel needs windows of at least 2 tokens: the minimum of one token is its maximum, and nothing "
                "would be quantised; use per_token or longer windows"
            )
            raise PolicyError(msg)
        return self._codec.layout(window_tokens, head_dim)

    def shared_layout(self, head_dim: int) -> Layout:
        return self._codec.shared_layout(head_dim)

    def fit(self, x: Tensor, origin: Origin) -> Codes:
        return self._codec.fit(x)

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        """Group along the tokens of each channel."""
        return self._codec.encode(x, shared)

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        """Rebuild windows in fp32."""
        return self._codec.decode(codes, head_dim)

    @functools.cached_property
    def _codec(self) -> Codec:
        stored = _stored(self.parameters, self.scale_bits)
        return Codec(
            PairedCodes(self.bits, "channel"),
            ByChannel(),
            PerSequence(stored) if self.scope == "sequence" else stored,
            self.levels,
            _wanted(
                (self.centred, Centred(self.parameters)),
                (self.rotated, Rotated()),
                (self.normed, Normed(self.parameters)),
            ),
        )


@attrs.frozen(cache_hash=True)  # backends look it up at every step
class PerToken(Quantizer):
    """One grid per token over the channels of a head: the axis for values, whose outliers keep to their tokens.

    The grid is that of :class:`PerChannel`. KIVI (arXiv 2402.02750), section 3; here the group is the whole head unless
    ``group_channels`` says otherwise. What else is done to values: ``centred``, ``channel_scaled``, ``rotated``, in
    this order.

    Args:
        bits: 2 (default), 3, 4 or 8.
        parameters: dtype of scale and zero point.
        group_channels: neighbouring channels that share a grid; KIVI has 32. None for all channels of a head.
        scale_bits: as in :class:`PerChannel`; one grid for all tokens of a window.
        centred: as in :class:`PerChannel`.
        channel_scaled: each channel is divided by ``sqrt(max |x|)`` over the sequence (ZipCache, arXiv 2405.14256,
            where a grid covers the channels of all heads). Channels of zeros are exact.
        rotated: as in :class:`PerChannel`.
        levels: as in :class:`PerChannel`.

    Bytes per window and KV head: ``window * (head_dim * bits / 8 + 2 * itemsize * groups)``, where ``groups`` is
    ``head_dim / group_channels`` or 1. With ``scale_bits``, the second summand is ``2 * groups * scale_bits / 8`` for
    each token and ``4 * itemsize`` for the window. ``centred`` and ``channel_scaled`` each add ``head_dim * itemsize``
    once per KV head of a row.
    """

    name: ClassVar[str] = "per_token"
    bits: int = attrs.field(default=2, validator=_known_bits)
    parameters: torch.dtype = attrs.field(default=torch.float16, validator=_known_dtype)
    group_channels: int | None = attrs.field(default=None, validator=_known_group, kw_only=True)
    scale_bits: int | None = attrs.field(default=None, validator=_known_scale_bits, kw_only=True)
    centred: bool = attrs.field(default=False, validator=_yes_or_no, kw_only=True)
    channel_scaled: bool = attrs.field(default=False, validator=_yes_or_no, kw_only=True)
    rotated: bool = attrs.field(default=False, validator=_yes_or_no, kw_only=True)
    levels: Levels = attrs.field(default="uniform", validator=_known_levels, kw_only=True)

    @property
    def paired(self) -> PairedCodes:
        """Codes of channel pairs, a grid per token."""
        return self._codec.readable

    @property
    def keeps_constants(self) -> bool:
        """Nothing is done to numbers before the grid of their own window is laid over them."""
        return self._codec.keeps_constants

    @property
    def min_snr_db(self) -> float:
        """6 dB a bit, less what a min-max grid over a head of normal samples loses."""
        return snr_db(self.levels, self.bits)

    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        """Codes channel by channel, and a scale and zero point per token, or per group of its channels."""
        if self.group_channels is not None and head_dim % self.group_channels:
            raise PolicyError(
                f"{head_dim} channels are no groups of {self.group_channels}; group_channels must divide head_dim, or "
                "be None for all channels of a head"
            )
        return self._codec.layout(window_tokens, head_dim)

    def shared_layout(self, head_dim: int) -> Layout:
        return self._codec.shared_layout(head_dim)

    def fit(self, x: Tensor, origin: Origin) -> Codes:
        return self._codec.fit(x)

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        """Group along the channels of each token."""
        return self._codec.encode(x, shared)

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        """Rebuild windows in fp32."""
        return self._codec.decode(codes, head_dim)

    @functools.cached_property
    def _codec(self) -> Codec:
        return Codec(
            PairedCodes(self.bits, "token"),
            ByToken(self.group_channels),
            _stored(self.parameters, self.scale_bits),
            self.levels,
            _wanted(
                (self.centred, Centred(self.parameters)),
                (self.channel_scaled, ChannelScaled(self.parameters)),
                (self.rotated, Rotated()),
            ),
        )


def _stored(parameters: torch.dtype, scale_bits: int | None) -> Scales:
    return Plain(parameters) if scale_bits is None else SecondLevel(scale_bits, parameters)


def _wanted(*transforms: tuple[bool, Transform]) -> tuple[Transform, ...]:
    return tuple(transform for wanted, transform in transforms if wanted)
