"""Asymmetric min-max grids: KIVI's keys per channel and values per token."""

from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.paired import PairedCodes, by_channels, by_pairs
from qevict.contracts.quantizer import NOTHING_SHARED, Quantizer
from qevict.contracts.values import ArraySpec, Codes, Layout
from qevict.errors import PolicyError
from qevict.quantizers.packing import CODES_PER_GROUP, pack, packed_bytes, unpack
from qevict.quantizers.rounding import round_down, round_up

_TOKENS, _CHANNELS = -1, -2
"""Axes of ``[head_dim, window]``, channel by channel as codes are packed: a group runs along one of them."""

_PARAMETER_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _known_bits(_instance: object, _attribute: object, value: int) -> None:
    if not isinstance(value, int) or value not in CODES_PER_GROUP:
        msg = f"bits={value!r} cannot be packed; allowed: {', '.join(map(str, CODES_PER_GROUP))}"
        raise PolicyError(msg)


def _known_dtype(_instance: object, _attribute: object, value: torch.dtype) -> None:
    if value not in _PARAMETER_DTYPES:
        msg = f"scales cannot be stored as {value!r}; allowed: {', '.join(map(str, _PARAMETER_DTYPES))}"
        raise PolicyError(msg)


@attrs.frozen
class PerChannel(Quantizer):
    """One grid per channel over the tokens of a window: the axis for keys, whose outliers keep to their channels.

    ``code = round((x - zero) / scale)`` with ``zero = min`` and ``scale = (max - min) / (2^bits - 1)`` over the group,
    both rounded outwards to the parameters' dtype, and codes computed against the stored grid. KIVI (arXiv 2402.02750),
    section 3; here the group is the window, as in QEvict (arXiv 2608.05326). Differs: KIVI and the QEvict authors round
    scale and zero to nearest, which lets data fall off the grid where an offset exceeds what the dtype resolves.

    Args:
        bits: 2 (default), 3, 4 or 8.
        parameters: dtype of scale and zero point; values beyond +-65504 need float32 or bfloat16.

    Bytes per window and KV head: ``head_dim * (window * bits / 8 + 2 * itemsize)``.
    """

    name: ClassVar[str] = "per_channel"
    bits: int = attrs.field(default=2, validator=_known_bits)
    parameters: torch.dtype = attrs.field(default=torch.float16, validator=_known_dtype)

    @property
    def paired(self) -> PairedCodes:
        """Codes of channel pairs, a grid per channel."""
        return PairedCodes(self.bits, "channel")

    @property
    def min_snr_db(self) -> float:
        """6 dB a bit, less what a min-max grid over few samples loses."""
        return _promised_snr_db(self.bits)

    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        """Codes channel by channel, and a scale and zero point per channel."""
        if window_tokens == 1:
            msg = (
                "per_channel needs windows of at least 2 tokens: the minimum of one token is its maximum, and nothing "
                "would be quantised; use per_token or longer windows"
            )
            raise PolicyError(msg)
        return _layout(self.bits, self.parameters, window_tokens, head_dim, groups=head_dim)

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        """Group along the tokens of each channel."""
        return _encode(x, self.bits, self.parameters, _TOKENS)

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        """Rebuild windows in fp32."""
        return _decode(codes, self.paired, head_dim, _TOKENS)


@attrs.frozen
class PerToken(Quantizer):
    """One grid per token over the channels of a head: the axis for values, whose outliers keep to their tokens.

    The grid is that of :class:`PerChannel`. KIVI (arXiv 2402.02750), section 3; here the group is the whole head.

    Args:
        bits: 2 (default), 3, 4 or 8.
        parameters: dtype of scale and zero point.

    Bytes per window and KV head: ``window * (head_dim * bits / 8 + 2 * itemsize)``.
    """

    name: ClassVar[str] = "per_token"
    bits: int = attrs.field(default=2, validator=_known_bits)
    parameters: torch.dtype = attrs.field(default=torch.float16, validator=_known_dtype)

    @property
    def paired(self) -> PairedCodes:
        """Codes of channel pairs, a grid per token."""
        return PairedCodes(self.bits, "token")

    @property
    def min_snr_db(self) -> float:
        """6 dB a bit, less what a min-max grid over a head of normal samples loses."""
        return _promised_snr_db(self.bits)

    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        """Codes channel by channel, and a scale and zero point per token."""
        return _layout(self.bits, self.parameters, window_tokens, head_dim, groups=window_tokens)

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        """Group along the channels of each token."""
        return _encode(x, self.bits, self.parameters, _CHANNELS)

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        """Rebuild windows in fp32."""
        return _decode(codes, self.paired, head_dim, _CHANNELS)


def _promised_snr_db(bits: int) -> float:
    return 6.02 * bits - 8.5  # groups of up to 1024 normal samples


def _layout(bits: int, parameters: torch.dtype, window_tokens: int, head_dim: int, groups: int) -> Layout:
    """Both kinds pack ``[head_dim, window]``, so that the tokens of a channel lie side by side."""
    codes = window_tokens * head_dim
    if head_dim % 2:
        msg = f"codes are packed by pairs of channels, so head_dim must be even, got {head_dim}"
        raise PolicyError(msg)
    if codes % CODES_PER_GROUP[bits]:
        msg = (
            f"{codes} codes of {bits} bits (window {window_tokens} x head_dim {head_dim}) do not fill whole bytes; "
            f"window x head_dim must be a multiple of {CODES_PER_GROUP[bits]}: change window_tokens or bits"
        )
        raise PolicyError(msg)
    return {
        "codes": ArraySpec((packed_bytes(codes, bits),), torch.uint8),
        "scale": ArraySpec((groups,), parameters),
        "zero": ArraySpec((groups,), parameters),
    }


def _encode(x: Tensor, bits: int, parameters: torch.dtype, along: int) -> Codes:
    """Encode ``[heads, windows, window, head_dim]`` with groups along one axis of ``[head_dim, window]``."""
    x = x.float().transpose(-1, -2)
    low, high = x.amin(along, keepdim=True), x.amax(along, keepdim=True)
    zero = round_down(low, parameters)
    scale = round_up((high - zero.float()) / (2**bits - 1), parameters)
    step = torch.where(scale > 0, scale, 1).float()
    codes = ((x - zero.float()) / step).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    packed = pack(by_pairs(codes).flatten(-2), bits)
    return {"codes": packed, "scale": scale.squeeze(along), "zero": zero.squeeze(along)}


def _decode(codes: Codes, paired: PairedCodes, head_dim: int, along: int) -> Tensor:
    packed, window = codes["codes"], 8 * codes["codes"].shape[-1] // (paired.bits * head_dim)
    scale, zero = codes["scale"].float().unsqueeze(-3 - along), codes["zero"].float().unsqueeze(-3 - along)
    if paired.reads_words(window):
        levels = paired.levels(packed.contiguous(), window, packed.shape[0])
        grid = levels.permute(0, 3, 2, 1, 4).flatten(3)
    else:
        grid = by_channels(unpack(packed, paired.bits).unflatten(-1, (head_dim, -1))).transpose(-1, -2).float()
    return torch.addcmul(zero, grid, scale)
