"""SnapKV's observation window."""

import attrs
import pytest
import torch

from qevict.contracts.values import Observation
from qevict.errors import PolicyError
from qevict.testing import ScorerContract
from qevict_baselines.pooling import Pool
from qevict_baselines.snapkv import ObservationWindow, OverHeads, PooledHeads
from tests.baselines import worked
from tests.baselines.shown import close, looked, prefix, ranked, windows
from tests.baselines.slow import snapkv
from tests.baselines.slow.basics import average_pool, group_max, group_mean, max_pool


class TestObservationWindow(ScorerContract):
    examples = 8
    part = ObservationWindow()


class TestObservationWindowMax(ScorerContract):
    examples = 8
    part = ObservationWindow(prompt_queries=3, kernel=3, pool="max", observe_tokens=2)


class TestPooledHeads(ScorerContract):
    examples = 8
    part = PooledHeads(kernel=3, pool="max", over_heads="max")


def toy(scorer: ObservationWindow) -> torch.Tensor:
    masses = prefix(worked.ATTENTION, worked.KV_HEADS, worked.WINDOW).sum(dim=2)
    prompt = looked(masses + torch.tensor([0.0] * 6 + [9.0] * 2), ends_prompt=True)
    return ranked(scorer, [prompt], windows(2, worked.LENGTH, candidates=6))[:, :6]


def test_the_worked_example() -> None:
    """Algorithms notes, section 4; what the window itself gets, however much, leaks nowhere."""
    close(toy(ObservationWindow(prompt_queries=2, kernel=3)), worked.SNAPKV_AVERAGE, 6e-5)
    close(toy(ObservationWindow(prompt_queries=2, kernel=3, pool="max")), worked.SNAPKV_MAX_OF_GROUP, 6e-5)


@pytest.mark.parametrize("kernel", [1, 5, 7])
@pytest.mark.parametrize("group", [1, 3])
def test_it_is_the_slow_one(kernel: int, group: int) -> None:
    attention = torch.rand(2 * group, 4, 13, generator=torch.Generator().manual_seed(kernel))
    prompt, rows = looked(attention.unflatten(0, (2, group)).sum(dim=2), ends_prompt=True), attention.tolist()
    average = ranked(ObservationWindow(prompt_queries=4, kernel=kernel), [prompt], windows(2, 13))
    close(average, snapkv.scores(rows, 2, kernel))
    highest = ranked(ObservationWindow(prompt_queries=4, kernel=kernel, pool="max"), [prompt], windows(2, 13))
    close(highest, snapkv.scores_of_groups(rows, 2, kernel, max_pool))
    close(average, snapkv.scores_of_groups(rows, 2, kernel, average_pool))


def test_each_period_looks_anew() -> None:
    scorer = ObservationWindow(prompt_queries=1, kernel=1)
    prompt, first = looked(torch.tensor([[[0.5, 0.25]]] * 2), ends_prompt=True), torch.tensor([True, False])
    later = looked(torch.tensor([[[0.1, 0.2]]] * 2), first=first)
    close(ranked(scorer, [prompt, later], windows(2, 2)), [[0.1, 0.2], [0.6, 0.45]])
    again = looked(torch.tensor([[[0.1, 0.2]]] * 2))
    close(ranked(scorer, [prompt, later, again], windows(2, 2)), [[0.2, 0.4], [0.7, 0.65]])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kernel": 4}, "kernel is an odd whole number of at least 1 .*, got 4"),
        ({"pool": "mean"}, "pool is one of 'average', 'max', got 'mean'"),
        ({"prompt_queries": 0}, "prompt_queries is a whole number of at least 1, got 0"),
    ],
)
def test_it_refuses_what_cannot_be(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        ObservationWindow(**arguments)  # type: ignore[arg-type]


def by_query(attention: torch.Tensor, lanes: int, recent: int) -> Observation:
    """``attention[query_head][query][key]``, behind which the observation window looks hard at itself."""
    masses = torch.nn.functional.pad(attention.unflatten(0, (lanes, -1)), (0, recent), value=7.0)
    asked, positions = torch.arange(attention.shape[1]) + attention.shape[2], torch.arange(masses.shape[-1])
    return Observation(
        torch.full((lanes, 1), -1),
        masses.shape[-1],
        mass_by_query=masses,
        asked=asked.expand(lanes, -1),
        positions=positions.expand(lanes, -1),
        ends_prompt=True,
    )


@pytest.mark.parametrize("pool", ["average", "max"])
@pytest.mark.parametrize("over_heads", ["mean", "max"])
def test_heads_pooled_by_themselves_are_the_slow_ones(pool: Pool, over_heads: OverHeads) -> None:
    attention = torch.rand(6, 4, 13, generator=torch.Generator().manual_seed(9))
    group, kernel = {"mean": group_mean, "max": group_max}[over_heads], {"average": average_pool, "max": max_pool}[pool]
    scorer = PooledHeads(4, 3, pool, over_heads)
    found = ranked(scorer, [by_query(attention, 2, 4)], windows(2, 17, candidates=13))
    close(found[:, :13], snapkv.scores(attention.tolist(), 2, 3, kernel, group))


def test_the_worked_maximum_over_heads() -> None:
    """Algorithms notes, section 4: two tokens beside the window of two; 2 and 3 are equal, and the earlier wins."""
    seen = by_query(torch.tensor(worked.ATTENTION), 2, 2)
    found = ranked(PooledHeads(2, 3, over_heads="max"), [seen], windows(2, 8, candidates=6))
    close(found[0, 2], found[0, 3])
    best = found[:, :6].mul(1e4).round().argsort(dim=1, descending=True, stable=True)[:, :2]
    assert [sorted([*row, 6, 7]) for row in best.tolist()] == worked.SNAPKV_GROUP_MAX_KEPT


def test_a_short_row_is_averaged_over_the_queries_that_it_has() -> None:
    seen = by_query(torch.full((2, 4, 3), 0.1), 2, 4)
    assert seen.asked is not None
    short = attrs.evolve(seen, asked=torch.tensor([[-1, -1, 5, 6], [3, 4, 5, 6]]))
    close(ranked(PooledHeads(4, 1), [short], windows(2, 7, candidates=3))[:, :3], torch.full((2, 3), 0.1))
