"""Between two budgets a loss lies on a straight line over the logarithm of bytes."""

import pytest

from qevict.bench.zoo.curve import interpolate

POINTS = [(0.1, 3.0), (0.2, 2.0), (1.0, 0.0)]


@pytest.mark.parametrize(("share", "loss"), [(0.1, 3.0), (0.2, 2.0), (1.0, 0.0), (0.02**0.5, 2.5), (0.2**0.5, 1.0)])
def test_known_points_and_geometric_means(share: float, loss: float) -> None:
    assert interpolate(POINTS, share) == pytest.approx(loss)


@pytest.mark.parametrize("share", [0.05, 1.2])
def test_nothing_is_known_beyond_the_ends(share: float) -> None:
    assert interpolate(POINTS, share) is None
    assert interpolate([], share) is None
