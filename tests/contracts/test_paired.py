"""The paired layout: which bit is which code."""

from collections.abc import Callable

import pytest
import torch

from qevict.contracts.paired import PairedCodes, by_channels, by_pairs
from qevict.errors import ContractError
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.quantizers.packing import pack


def test_one_word_feeds_both_halves_of_a_rotation() -> None:
    """By hand: 4 channels, 8 tokens of 2 bits. Word 0 is channel 0 in the low 16 bits and channel 2 above them."""
    channels = torch.zeros(4, 8, dtype=torch.uint8)
    channels[0] = torch.tensor([3, 0, 0, 0, 0, 0, 0, 1])
    channels[2] = torch.tensor([2, 1, 0, 0, 0, 0, 0, 3])
    channels[1, 3], channels[3, 5] = 1, 2
    words = pack(by_pairs(channels).flatten(), 2).view(torch.int32).tolist()
    low, high = 3 | 1 << 14, 2 | 1 << 2 | 3 << 14
    assert words[0] & 0xFFFFFFFF == low | high << 16
    assert words[1] & 0xFFFFFFFF == 1 << 6 | (2 << 10) << 16


def test_pairs_and_channels_are_inverse() -> None:
    channels = torch.arange(6 * 4).view(6, 4)
    assert by_pairs(channels)[:, 0].tolist() == [0, 12, 4, 16, 8, 20]
    assert torch.equal(by_channels(by_pairs(channels)), channels)


@pytest.mark.parametrize(("bits", "window"), [(2, 8), (4, 4), (2, 4), (4, 8), (2, 16), (8, 4), (8, 2), (4, 2)])
@pytest.mark.parametrize("kind", [PerChannel, PerToken])
def test_levels_are_what_decoding_starts_from(kind: type[PerChannel] | type[PerToken], bits: int, window: int) -> None:
    """``x = zero + scale * level`` for every token and channel, two lanes of three slots."""
    quantizer = kind(bits)
    paired = quantizer.paired
    assert paired is not None
    assert paired.reads_words(window)
    x = torch.randn(2, 6, window, 8)
    codes = quantizer.encode(x)
    levels = paired.levels(codes["codes"], window, 4).unflatten(0, (2, 2))
    grid = levels.permute(0, 1, 4, 3, 2, 5).flatten(4).flatten(1, 2)
    axis = -2 if paired.per == "channel" else -1
    scale, zero = (codes[name].float().unsqueeze(axis) for name in ("scale", "zero"))
    torch.testing.assert_close(zero + scale * grid, quantizer.decode(codes, 8), rtol=1e-6, atol=1e-6)
    assert int(levels.max()) == 2**bits - 1


def test_pairs_that_fill_no_word_are_decoded() -> None:
    assert not PairedCodes(3, "channel").reads_words(8)
    assert not PairedCodes(8, "token").reads_words(8)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: PairedCodes(5, "channel"), "2, 3, 4 or 8 bits"),
        (lambda: PairedCodes(2, "channel", scale_bits=2), "4 or 8"),
        (lambda: PairedCodes(2, "token", places=(0.0, 1.0)), "2 bits have 4 places, got 2"),
        (lambda: PairedCodes(2, "token", undone=("mean", "hadamard")), "comes in the order norm, hadamard"),
    ],
)
def test_what_is_no_such_layout_is_refused(made: Callable[[], PairedCodes], said: str) -> None:
    with pytest.raises(ContractError, match=said):
        made()
