"""The fused operators, and plain torch, agree about everything, also about queries that see nothing."""

import pytest
import torch

from qevict.backends import fused
from qevict.backends.fused import fused_attention, fused_operator

CPU = torch.device("cpu")


def ask() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(2, 3, length, 16, generator=generator) for length in (5, 40, 40))
    hidden = torch.rand(2, 1, 5, 40, generator=generator) < 0.4
    hidden[0, 0, 2] = True
    return queries, keys, values, hidden


@pytest.mark.parametrize("there", [True, False])
def test_output_and_log_sum_exp(monkeypatch: pytest.MonkeyPatch, *, there: bool) -> None:
    queries, keys, values, hidden = ask()
    if not there:
        monkeypatch.setattr(fused, "fused_operator", lambda _device: None)
    output, lse = fused_attention(queries, keys, values, hidden)
    logits = (queries @ keys.mT).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    wanted = logits.softmax(-1).nan_to_num(nan=0.0) @ values
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
    assert bool((lse[0, :, 2] == -torch.inf).all())
    assert bool((output[0, :, 2] == 0).all())


def test_the_operator_of_this_build() -> None:
    """Known by name, so that a build without it is noticed here and named in reports."""
    assert fused_operator(CPU) == "_scaled_dot_product_flash_attention_for_cpu"
    assert fused_operator(torch.device("meta")) is None
