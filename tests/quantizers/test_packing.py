"""Codes packed into bytes without a gap."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qevict.quantizers.packing import CODES_PER_GROUP, pack, packed_bytes, unpack

BITS = (2, 3, 4, 8)


@given(st.sampled_from(BITS), st.integers(1, 3), st.integers(1, 4), st.integers(1, 20), st.integers(0, 2**31))
@settings(deadline=None, max_examples=100)
def test_codes_survive_packing_and_take_no_byte_more(
    bits: int, heads: int, windows: int, groups: int, seed: int
) -> None:
    codes = groups * CODES_PER_GROUP[bits]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 2**bits, (heads, windows, codes), dtype=torch.uint8, generator=generator)
    packed = pack(x, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (heads, windows, codes * bits // 8) == (heads, windows, packed_bytes(codes, bits))
    assert torch.equal(unpack(packed, bits), x)


@pytest.mark.parametrize("bits", BITS)
def test_every_byte_pattern_is_some_codes(bits: int) -> None:
    """No bit is wasted: unpacking anything and packing it again gives it back."""
    size = CODES_PER_GROUP[bits] * bits // 8
    generator = torch.Generator().manual_seed(bits)
    packed = torch.randint(0, 256, (512, 4 * size), dtype=torch.uint8, generator=generator)
    assert torch.equal(pack(unpack(packed, bits), bits), packed)


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_code_fills_every_bit(bits: int) -> None:
    codes = torch.full((8,), 2**bits - 1, dtype=torch.uint8)
    assert pack(codes, bits).tolist() == [255] * bits


@pytest.mark.parametrize("bits", BITS)
def test_the_stream_is_little_endian_first_code_lowest(bits: int) -> None:
    """Code ``i`` starts at bit ``i * bits`` of the stream, bytes in ascending order; by Python's integers."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (24,), dtype=torch.uint8, generator=generator)
    stream = sum(int(code) << (index * bits) for index, code in enumerate(codes))
    assert bytes(pack(codes, bits).tolist()) == stream.to_bytes(24 * bits // 8, "little")


@pytest.mark.parametrize(
    ("codes", "word"),
    [
        # Two channels of 16 tokens, packed along tokens into an int32 as by KIVI's public kernel
        # (arXiv 2402.02750): the ramp 0 ... 15, and zeros with +30 at 5 and -30 at 9.
        ([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3], -22391488),
        ([2, 2, 2, 2, 2, 3, 2, 2, 2, 0, 2, 2, 2, 2, 2, 2], -1432179030),
    ],
)
def test_two_bit_words_are_those_of_kivi(codes: list[int], word: int) -> None:
    packed = pack(torch.tensor(codes, dtype=torch.uint8), 2)
    assert bytes(packed.tolist()) == word.to_bytes(4, "little", signed=True)


@pytest.mark.parametrize("bits", BITS)
def test_strided_input_packs_the_same(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    x = torch.randint(0, 2**bits, (8, 5), dtype=torch.uint8, generator=generator)
    assert torch.equal(pack(x.T, bits), pack(x.T.contiguous(), bits))
    assert torch.equal(unpack(pack(x.T, bits), bits), x.T)
