"""The named layout of packed codes, which kernels read in place."""

from typing import Literal, get_args

import attrs
import torch
from torch import Tensor

from qevict.errors import ContractError

Undone = Literal["norm", "hadamard", "channel_scale", "mean"]
"""What may have been done to numbers before a grid was laid over them."""

_WORDS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


@attrs.frozen
class PairedCodes:
    """Codes channel by channel, the two channels that RoPE turns together side by side: ``paired`` for short.

    Channel ``c`` of a window has ``window * bits`` bits: its tokens in order, the first in the lowest bits. Bytes hold
    channel 0, channel ``head_dim / 2``, channel 1, channel ``head_dim / 2 + 1``, and so on; scales and zero points keep
    the order of channels, or of tokens. With 8 tokens of 2 bits one 32-bit load feeds both halves of a rotation.

    A number is ``zero + scale * code`` of the arrays ``codes``, ``scale`` and ``zero`` if the layout is :attr:`plain`.
    The further attributes name what else there is to read.

    Attributes:
        bits: bits of a code.
        per: what shares a scale and a zero point: a channel of a window, or a token of a head.
        group_channels: neighbouring channels that share those of a token, whose grids then lie group by group, each
            with its tokens in order; None for all channels of a head.
        scale_bits: 4 or 8 where scales and zero points are codes themselves, packed in order, the first in the lowest
            bits: ``least + step * code``, with both in the arrays ``scale_range`` and ``zero_range``; None otherwise.
        places: what stands in place of each code, in steps of the grid; None where a code stands for itself.
        undone: what is done to these numbers, some of the following in this order: ``norm`` multiplies each token by
            the array of that name; ``hadamard`` mixes the channels, in blocks of the largest power of two ``n`` that
            divides their number, by Sylvester's matrix over ``2^floor(log2(n) / 2)``; ``channel_scale`` multiplies each
            channel by the array of that name, and ``mean`` adds it. These two belong to the sequence.

    Numbers are float16, bfloat16 or float32.

    Raises:
        ContractError: no such layout.
    """

    bits: int
    per: Literal["channel", "token"]
    group_channels: int | None = attrs.field(default=None, kw_only=True)
    scale_bits: int | None = attrs.field(default=None, kw_only=True)
    places: tuple[float, ...] | None = attrs.field(default=None, kw_only=True)
    undone: tuple[Undone, ...] = attrs.field(default=(), kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.bits not in {2, 3, 4, 8} or self.scale_bits not in {None, 4, 8}:
            raise ContractError(f"codes have 2, 3, 4 or 8 bits, scales that are codes 4 or 8; got {self!r}")
        if self.places is not None and len(self.places) != 2**self.bits:
            raise ContractError(f"{self.bits} bits have {2**self.bits} places, got {len(self.places)}: {self!r}")
        if self.undone != tuple(step for step in get_args(Undone) if step in self.undone):
            raise ContractError(f"what is undone comes in the order {', '.join(get_args(Undone))}; got {self!r}")

    @property
    def plain(self) -> bool:
        """A number is ``zero + scale * code``, and nothing else."""
        return self == PairedCodes(self.bits, self.per)

    def reads_words(self, window_tokens: int) -> bool:
        """Whether a pair fills a machine word, so that :meth:`levels` can read it."""
        return 2 * window_tokens * self.bits in _WORDS

    def levels(self, packed: Tensor, window_tokens: int, strips: int) -> Tensor:
        """Codes as fp32 numbers, token by token.

        Args:
            packed: ``[heads, slots, bytes]``, contiguous.
            window_tokens: tokens of a window.
            strips: heads times lanes of equally many slots.

        Returns:
            ``[strips, 2, window, slots of a lane, head_dim / 2]``: the lower half of the channels, then the upper.
        """
        word_bits = 2 * window_tokens * self.bits
        words = packed.view(_WORDS[word_bits])
        words = words.view(strips, 1, 1, -1, words.shape[2])
        shifts = torch.arange(0, word_bits, self.bits, dtype=words.dtype, device=words.device)
        codes = words >> shifts.view(2, window_tokens, 1, 1)
        numbers: Tensor = codes.bitwise_and_(2**self.bits - 1).float()
        return numbers


def by_pairs(channels: Tensor) -> Tensor:
    """``[..., head_dim, window]`` in the order in which channels are packed."""
    pairs: Tensor = channels.unflatten(-2, (2, -1)).transpose(-3, -2)
    return pairs.flatten(-3, -2)


def by_channels(pairs: Tensor) -> Tensor:
    """The inverse of :func:`by_pairs`."""
    halves: Tensor = pairs.unflatten(-2, (-1, 2)).transpose(-3, -2)
    return halves.flatten(-3, -2)
