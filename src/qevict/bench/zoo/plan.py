"""What fits into the time that is left: rounds over all tasks, and in each round as many levels as can be paid for."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import attrs

from qevict.bench.zoo.field import Level, Run
from qevict.bench.zoo.prompts import Prompt
from qevict.bench.zoo.texts import LONG, SHORT

SPARE = 0.03
"""Part of the time that is left for what nobody foresees."""


@attrs.frozen
class Visit:
    """A prompt, and what is still to be measured on it, by level.

    Attributes:
        prompt: what is read once.
        runs: by number of the level, which ascends.
    """

    prompt: Prompt
    runs: Mapping[int, Sequence[Run]]

    def until(self, level: int) -> tuple[Run, ...]:
        """What the first levels ask for, the given one among them."""
        return tuple(run for number, runs in self.runs.items() if number <= level for run in runs)


@attrs.define
class Pace:
    """What reading a prompt and measuring a policy on it takes, learned while it is done.

    Attributes:
        reading: seconds spent on reading, and how many prompts that were, by length.
        running: seconds spent on policies, and how many that were, by length.
    """

    reading: dict[str, tuple[float, int]] = attrs.field(factory=lambda: {SHORT: (7.0, 1), LONG: (40.0, 1)})
    running: dict[str, tuple[float, int]] = attrs.field(factory=lambda: {SHORT: (1.0, 1), LONG: (3.0, 1)})

    def learn(self, length: str, read_seconds: float, run_seconds: float, runs: int) -> None:
        """Count a visit in."""
        for table, seconds, count in ((self.reading, read_seconds, 1), (self.running, run_seconds, runs)):
            known, number = table[length]
            table[length] = known + seconds, number + count

    def seconds(self, visit: Visit, level: int) -> float:
        """What a visit would take, down to a level."""
        runs, length = len(visit.until(level)), visit.prompt.length
        if not runs:
            return 0.0
        (read_seconds, prompts), (run_seconds, count) = self.reading[length], self.running[length]
        return read_seconds / prompts + runs * run_seconds / count


@attrs.define
class Schedule:
    """Chooses how deep each visit goes.

    Attributes:
        visits: in the order in which they are made.
        deadline: when all has to be done, on the clock.
        workers: how many visits are made at once.
        pace: what they take.
        clock: seconds.
    """

    visits: list[Visit]
    deadline: float
    workers: int
    pace: Pace = attrs.field(factory=Pace)
    clock: Callable[[], float] = time.monotonic

    def next(self) -> tuple[Visit, tuple[Run, ...]] | None:
        """The next visit and what it measures; None when nothing is left, or nothing fits.

        A level is measured if all levels above it can still be measured on every prompt that comes later: they matter
        more. What no time is left for on this visit is passed over for good.
        """
        while self.visits:
            visit = self.visits.pop(0)
            left = (self.deadline - self.clock()) * (1 - SPARE)
            deep = [level for level in visit.runs if self._fits(visit, level, left)]
            if deep:
                return visit, visit.until(max(deep))
        return None

    def _fits(self, visit: Visit, level: int, left: float) -> bool:
        own = self.pace.seconds(visit, level)
        if own > left:
            return False
        later = sum(self.pace.seconds(other, level - 1) for other in self.visits)
        return own + later <= left * self.workers


def visits(
    prompts: Iterable[Prompt],
    levels: Sequence[Level],
    runs: Callable[[Level], Iterable[Run]],
    done: Mapping[str, AbstractSet[str]],
) -> list[Visit]:
    """All visits, in rounds: the first prompt of every task, then the second, so that every cell grows evenly.

    Args:
        prompts: in any order.
        levels: what is measured, in the order of its weight.
        runs: what a level measures.
        done: what an earlier run has measured, by the prompt's key.
    """
    asked = [(level, tuple(runs(level))) for level in levels]
    ordered = sorted(prompts, key=lambda prompt: (prompt.place, prompt.length == LONG))
    found = (Visit(prompt, _todo(prompt, asked, done.get(prompt.key, set()))) for prompt in ordered)
    return [visit for visit in found if visit.runs]


def _todo(
    prompt: Prompt, asked: Sequence[tuple[Level, Sequence[Run]]], done: AbstractSet[str]
) -> dict[int, Sequence[Run]]:
    """What each level still wants of a prompt; what several want, the first of them measures."""
    todo: dict[int, Sequence[Run]] = {}
    known = set(done)
    for number, (level, runs) in enumerate(asked):
        if level.length == prompt.length and prompt.place < level.prompts and level.mode in prompt.modes:
            own = [run for run in runs if run.key not in known]
            known.update(run.key for run in own)
            if own:
                todo[number] = own
    return todo
