"""Time: what matters most is measured on all prompts before anything else gets a second, and the end is kept."""

from collections import Counter
from collections.abc import Iterator

import attrs
import pytest
import torch

from qevict.bench.zoo.field import CANDIDATE, EVICTING, FULL, LEVELS, OURS, Level, guest, known_entrants, runs
from qevict.bench.zoo.plan import Pace, Schedule, Visit, visits
from qevict.bench.zoo.prompts import SEEN, UNSEEN, Prompt
from qevict.errors import PolicyError
from qevict.policies import evict_only, full

FIRST = Level((CANDIDATE,), "900", UNSEEN, ("20 %",), 4)
SECOND = Level(("plain",), "900", UNSEEN, ("20 %",), 3)
THIRD = Level((CANDIDATE,), "900", SEEN, ("20 %",), 2)
FAR = Level((CANDIDATE,), "3000", UNSEEN, ("20 %",), 1)
TASKS = ("a", "b")


def prompts() -> Iterator[Prompt]:
    for task in TASKS:
        for place in range(4):
            yield Prompt(task, "900", place, "text", "question" if task == "a" else "")
        yield Prompt(task, "3000", 0, "text", "question")


def planned(done: dict[str, set[str]] | None = None) -> list[Visit]:
    entrants, _ = known_entrants()
    own = [entrant for entrant in entrants if entrant.name in {FULL, OURS, "evict-only"}]
    return visits(prompts(), (FIRST, SECOND, THIRD, FAR), lambda level: runs(own, level), done or {})


@attrs.define
class FakeTime:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def spend(minutes: float, *, read: float = 10.0, run: float = 1.0) -> tuple[Counter[str], float]:
    """What is measured, by level's first group and mode, where each visit takes what the pace says."""
    clock = FakeTime()
    pace = Pace({"900": (read, 1), "3000": (5 * read, 1)}, {"900": (run, 1), "3000": (run, 1)})
    schedule, found = Schedule(planned(), 60 * minutes, 1, pace, clock), Counter[str]()
    while (chosen := schedule.next()) is not None:
        visit, own = chosen
        clock.now += (5 * read if visit.prompt.length == "3000" else read) + run * len(own)
        found.update(f"{visit.prompt.length}/{each.key}" for each in own)
    return found, clock.now


def test_rounds_go_over_all_tasks_and_long_prompts_come_last_in_each() -> None:
    order = [(visit.prompt.task, visit.prompt.length, visit.prompt.place) for visit in planned()]
    assert order[:5] == [("a", "900", 0), ("b", "900", 0), ("a", "3000", 0), ("b", "3000", 0), ("a", "900", 1)]


def test_everything_is_measured_where_there_is_time() -> None:
    found, _ = spend(60)
    assert found["900/unseen/QEvict/20 %"] == found["900/unseen/full/"] == 8
    assert found["900/unseen/evict-only/20 %"] == 6
    assert found["900/seen/QEvict/20 %"] == 2, "a text that goes on has no question to be seen"
    assert found["3000/unseen/QEvict/20 %"] == 2


@pytest.mark.parametrize("minutes", [0.5, 1, 1.5, 1.8, 2, 3, 4])
def test_the_end_is_kept_and_what_matters_comes_first(minutes: float) -> None:
    found, took = spend(minutes)
    assert took <= 60 * minutes
    if found["900/unseen/evict-only/20 %"]:
        assert found["900/unseen/QEvict/20 %"] == 8
    if found["900/seen/QEvict/20 %"] or found["3000/unseen/QEvict/20 %"]:
        assert found["900/unseen/evict-only/20 %"] == 6


def test_two_workers_get_more_done() -> None:
    chosen = [Schedule(planned(), 60.0, workers, clock=FakeTime()).next() for workers in (1, 2)]
    slow, fast = (len(own[1]) for own in chosen if own is not None)
    assert slow < fast


def test_a_visit_has_to_end_in_time_whoever_else_is_at_work() -> None:
    pace = Pace({"900": (10.0, 1), "3000": (50.0, 1)}, {"900": (1.0, 1), "3000": (1.0, 1)})
    assert Schedule(planned(), 11.0, 9, pace, FakeTime()).next() is None


def test_what_was_done_is_not_done_again() -> None:
    whole = planned()
    done = {"a/900/0": {run.key for run in whole[0].until(9)}, "b/900/0": {"unseen/full/"}}
    rest = planned(done)
    assert len(rest) == len(whole) - 1
    assert [run.key for run in rest[0].until(0)] == ["unseen/QEvict/20 %"]


def test_what_two_levels_ask_for_is_measured_once() -> None:
    entrants, _ = known_entrants()
    twice = visits(
        prompts(), (FIRST, attrs.evolve(FIRST, budgets=("20 %", "5 %"))), lambda level: runs(entrants, level), {}
    )
    keys = [run.key for run in twice[0].until(1)]
    assert len(keys) == len(set(keys))
    assert "unseen/QEvict/5 %" in keys


def test_a_pace_is_learned() -> None:
    pace, visit = Pace({"900": (10.0, 1)}, {"900": (1.0, 1)}), planned()[0]
    assert pace.seconds(visit, 0) == 12.0
    pace.learn("900", 20.0, 6.0, 2)
    assert pace.seconds(visit, 0) == pytest.approx(15 + 2 * 7 / 3)
    assert pace.seconds(visit, -1) == 0.0


def test_levels_ask_for_the_cells_of_the_target() -> None:
    entrants, missing = known_entrants()
    assert {FULL, OURS, "evict-only", "sinks + recent"} <= {entrant.name for entrant in entrants}
    assert not {entrant.name for entrant in entrants}.intersection(missing)
    first = {run.key for run in runs(entrants, LEVELS[0])}
    assert {"unseen/full/", "unseen/QEvict/20 %", "unseen/QEvict/10 %"} <= first
    assert LEVELS[0].prompts >= 48
    cells = {(level.length, level.mode, budget) for level in LEVELS for budget in level.budgets}
    assert {("900", mode, budget) for mode in (UNSEEN, SEEN) for budget in ("20 %", "10 %", "5 %", "25 %")} <= cells
    assert {("3000", mode, budget) for mode in (UNSEEN, SEEN) for budget in ("10 %", "5 %")} <= cells
    assert EVICTING in {group for level in LEVELS for group in level.groups}


def test_a_guest_is_measured_at_the_budgets_of_the_cells() -> None:
    own = guest("mine", evict_only("30 %"))
    assert {str(run.policy.budget) for run in runs([own], LEVELS[0])} == {
        str(evict_only(budget).budget) for budget in ("20 %", "10 %")
    }
    assert [run.cell.budget for run in runs([guest("all", full())], LEVELS[0])] == [None]

    with pytest.raises(PolicyError, match="set it to bfloat16"):
        guest("mine", evict_only("30 %", dtype=torch.float32))
