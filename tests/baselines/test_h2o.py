"""The latest and the heavy ones against a loop, and the worked values of the algorithms notes, section 3."""

from hypothesis import given, settings
from hypothesis import strategies as st

from qevict.contracts.scorer import IMPORTANCE
from qevict.testing import RouterContract
from qevict_baselines.h2o import HeavyAndRecent
from tests.baselines.slow.h2o import evicted
from tests.baselines.worked import H2O_KEPT, H2O_KEPT_DECODED, H2O_SUMS, H2O_SUMS_DECODED
from tests.routers.by_loop import Remaining, by_loop, kept, layer_of, scene_of


def heavy_and_recent(left: Remaining, slots: int) -> list[list[int]]:
    [scores] = left.scores[IMPORTANCE]
    return [[at for at, _ in evicted([*enumerate(scores)], slots - slots // 2, slots // 2)]]


@given(st.integers(0, 2**31))
@settings(deadline=None, max_examples=80)
def test_the_plan_is_that_of_the_loop(seed: int) -> None:
    scene = scene_of(seed)
    plan = scene.ask(HeavyAndRecent(scene.shares))
    assert plan.place.tolist() == by_loop(scene, "lane", lambda _: heavy_and_recent)


def test_the_worked_example() -> None:
    """Two heavy ones and two recent ones, after a prompt of five tokens and after one more."""
    prompt = layer_of({IMPORTANCE: H2O_SUMS}, 4)
    assert kept(prompt, HeavyAndRecent()) == H2O_KEPT
    step = prompt._replace(positions=[[*own, 5] for own in H2O_KEPT], scores={IMPORTANCE: H2O_SUMS_DECODED})
    assert kept(step, HeavyAndRecent()) == H2O_KEPT_DECODED


class TestHeavyAndRecent(RouterContract):
    part = HeavyAndRecent((0.4, 0.6))
    examples = 8
