"""The values between the parts: sizes, and sums by window."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qevict.contracts.values import ArraySpec, Geometry, Observation, layout_bytes


@given(st.integers(1, 3), st.integers(0, 12), st.integers(1, 5), st.integers(0, 2**31), st.booleans())
@settings(deadline=None, max_examples=60)
def test_sums_by_window_are_those_of_a_loop(lanes: int, tokens: int, windows: int, seed: int, half: bool) -> None:
    """Sinks and pads (column -1) count nowhere; several tokens of a window add up, in fp32."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randint(-1, windows, (lanes, tokens), generator=generator)
    amounts = torch.randn(lanes, tokens, generator=generator).to(torch.bfloat16 if half else torch.float32)
    expected = torch.zeros(lanes, windows)
    for lane in range(lanes):
        for token in range(tokens):
            column = int(columns[lane, token])
            if column >= 0:
                expected[lane, column] += float(amounts[lane, token])
    sums = Observation(columns=columns, windows=windows).sum_by_window(amounts)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, expected, rtol=1e-6, atol=1e-6)


def test_sums_by_window_do_not_stop_growing_in_16_bits() -> None:
    columns = torch.zeros(1, 1000, dtype=torch.int64)
    sums = Observation(columns=columns, windows=1).sum_by_window(torch.ones(1, 1000, dtype=torch.bfloat16))
    assert sums.tolist() == [[1000.0]]


def test_sums_by_window_leave_the_amounts_alone() -> None:
    amounts = torch.ones(1, 2)
    Observation(columns=torch.tensor([[0, -1]]), windows=2).sum_by_window(amounts)
    assert amounts.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 4096), (torch.float16, 4096), (torch.float32, 8192)])
def test_bytes_of_a_token(dtype: torch.dtype, expected: int) -> None:
    """Llama-3.1-8B: 8 KV heads of 128 channels, key and value."""
    assert Geometry(layers=32, q_heads=32, kv_heads=8, head_dim=128, dtype=dtype).token_bytes == expected


def test_bytes_of_a_layout_are_those_of_real_arrays() -> None:
    layout = {
        "codes": ArraySpec((3, 5), torch.uint8),
        "scale": ArraySpec((7,), torch.float16),
        "flag": ArraySpec((), torch.float32),
    }
    real = [torch.zeros(spec.shape, dtype=spec.dtype).untyped_storage().nbytes() for spec in layout.values()]
    assert [spec.nbytes for spec in layout.values()] == real == [15, 14, 4]
    assert layout_bytes(layout) == 33
