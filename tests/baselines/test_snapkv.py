"""SnapKV's observation window."""

import pytest
import torch

from qevict.errors import PolicyError
from qevict.testing import ScorerContract
from qevict_baselines.snapkv import ObservationWindow
from tests.baselines import worked
from tests.baselines.shown import close, looked, prefix, ranked, windows
from tests.baselines.slow import snapkv
from tests.baselines.slow.basics import average_pool, max_pool


class TestObservationWindow(ScorerContract):
    examples = 12
    part = ObservationWindow()


class TestObservationWindowMax(ScorerContract):
    examples = 12
    part = ObservationWindow(prompt_queries=3, kernel=3, pool="max", observe_tokens=2)


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
