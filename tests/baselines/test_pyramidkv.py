"""PyramidKV's shares by its formula, and the worked values of the algorithms notes, section 12."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qevict.contracts.router import LayerBounds
from qevict.contracts.values import Geometry
from qevict.errors import PolicyError
from qevict.routers.greedy import GreedyTiers
from qevict.testing import RouterContract
from qevict_baselines.adakv import AdaptiveHeads
from qevict_baselines.h2o import HeavyAndRecent
from qevict_baselines.pyramidkv import PyramidShares
from tests.baselines.slow.pyramidkv import prefix_tokens
from tests.baselines.worked import PYRAMID_LARGE, PYRAMID_SMALL
from tests.routers.by_loop import scene_of


def shares(total: int, layers: int, least: int, most: int, beta: float = 20) -> list[int]:
    geometry = Geometry(layers, q_heads=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    return list(PyramidShares(beta=beta).share(total, geometry, LayerBounds(least, most)))


def test_the_worked_example() -> None:
    """24 tokens per layer, 4 of them always kept, 200 tokens, 5 layers; the authors' steps are whole, and overshoot.

    Beyond the 4 tokens, theirs are 39, 30, 21, 12 and 3, together 105 in place of 100. In hundredths of a token:
    """
    assert prefix_tokens(24, 4, 200, 5) == PYRAMID_SMALL
    assert shares(5 * 2400, 5, 400, 20000) == [4300, 3350, 2400, 1450, 500]
    assert shares(5 * 24, 5, 4, 200) == [43, 33, 24, 15, 5]


def test_the_worked_example_of_many_layers() -> None:
    """544 tokens, 32 of them always kept, 8192 tokens, 32 layers; the authors' whole steps overshoot by 6.5 each."""
    assert PYRAMID_LARGE == (999, 38, 32 * 512 + 208, 518.5)
    parts = shares(32 * 544, 32, 32, 8192)
    assert sum(parts) == 32 * 544
    assert (parts[0] - 32, parts[-1] - 32) == (998, 26)  # 2 * 512 - 25.6 and 25.6


@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(0, 5000),
    st.integers(0, 60000),
    st.sampled_from([1, 2.5, 20]),
)
def test_the_line_by_its_formula(total: int, layers: int, least: int, usable: int, beta: float) -> None:
    """Never above the total, never below what layers take; each within a byte of the line."""
    parts = shares(total, layers, least, least + usable, beta)
    base = Fraction(total, layers) - least
    if not 0 < base < usable or layers == 1:
        assert parts == [total // layers] * layers
        return
    last = base / Fraction(beta)
    first = 2 * base - last
    if first > usable:
        first, last = Fraction(usable), 2 * base - usable
    line = [least + first + (last - first) * layer / (layers - 1) for layer in range(layers)]
    assert sum(parts) == total
    assert all(abs(part - wanted) < 1 for part, wanted in zip(parts, line, strict=True))
    assert min(parts) >= least - 1


def test_a_first_layer_gets_no_more_than_it_can_use() -> None:
    assert shares(300, 3, 10, 160) == [160, 100, 40]


def test_the_router_within_decides_the_rest() -> None:
    scene = scene_of(5)
    for within in (AdaptiveHeads(scene.shares), HeavyAndRecent(scene.shares)):
        router = PyramidShares(within)
        assert (router.scope, router.rankings, router.earlier_wins) == (
            within.scope,
            within.rankings,
            within.earlier_wins,
        )
        assert scene.ask(router).place.equal(scene.ask(within).place)
        with pytest.raises(PolicyError, match="one share per tier"):
            router.check(len(scene.shares) + 1)
    assert PyramidShares() == PyramidShares(GreedyTiers())


@pytest.mark.parametrize("beta", [0.5, 0, -1, True, float("nan"), float("inf"), "20"])
def test_a_steepness_below_1_is_refused(beta: float) -> None:
    with pytest.raises(PolicyError, match="at least 1; got"):
        PyramidShares(beta=beta)


class TestPyramidShares(RouterContract):
    part = PyramidShares(GreedyTiers((0.3, 0.7)))
    examples = 8
