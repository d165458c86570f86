"""The paired bootstrap: what it must say of numbers whose answer is known."""

import pytest
import torch

from qevict.bench.statistics import paired_difference


def test_a_constant_difference_is_certain() -> None:
    found = paired_difference([3.5, 1.5, 2.5], [3.0, 1.0, 2.0])
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    assert found.excludes_zero


def test_pairing_removes_what_prompts_have_in_common() -> None:
    """Prompts differ by far more than the policies do, and still the difference shows."""
    generator = torch.Generator().manual_seed(1)
    base = 100 * torch.rand(40, generator=generator)
    small = 0.1 + 0.05 * torch.randn(40, generator=generator)
    found = paired_difference((base + small).tolist(), base.tolist())
    assert found.excludes_zero
    assert 0.05 < found.low < found.mean < found.high < 0.15


def test_noise_proves_nothing() -> None:
    noise = torch.randn(48, generator=torch.Generator().manual_seed(2)).tolist()
    assert not paired_difference(noise, [0.0] * 48).excludes_zero


def test_the_interval_is_that_of_the_normal_theory_where_that_holds() -> None:
    """1.96 standard errors to both sides, for many normal differences."""
    numbers = torch.randn(400, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = paired_difference(numbers.tolist(), [0.0] * 400)
    half = 1.96 * float(numbers.std()) / 20
    assert found.low == pytest.approx(float(numbers.mean()) - half, abs=0.1 * half)
    assert found.high == pytest.approx(float(numbers.mean()) + half, abs=0.1 * half)


def test_the_sign_is_ours_minus_theirs_and_equal_input_gives_equal_intervals() -> None:
    ours, theirs = [1.0, 2.0, 4.0], [2.0, 5.0, 5.0]
    found, turned = paired_difference(ours, theirs), paired_difference(theirs, ours)
    assert found == paired_difference(ours, theirs)
    assert found.mean == pytest.approx(-5 / 3)
    assert turned.mean == pytest.approx(5 / 3)


@pytest.mark.parametrize(("ours", "theirs"), [([1.0], [2.0]), ([1.0, 2.0], [1.0]), ([], [])])
def test_what_is_no_pair_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="two or more pairs"):
        paired_difference(ours, theirs)
