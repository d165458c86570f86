"""The whole run: from prompts, policies and minutes to a record."""

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from qevict.bench.models import load
from qevict.bench.provenance import provenance
from qevict.bench.zoo import work
from qevict.bench.zoo.field import LEVELS, Entrant, runs
from qevict.bench.zoo.interim import Interim, done
from qevict.bench.zoo.measure import Outcome
from qevict.bench.zoo.plan import Schedule, Visit, visits
from qevict.bench.zoo.prompts import Prompt
from qevict.bench.zoo.record import Record, rows_of
from qevict.bench.zoo.tasks import TASKS


@attrs.frozen
class Wish:
    """What is asked for.

    Attributes:
        model: name or folder.
        entrants: who takes part.
        missing: names of those who are not installed.
        tasks: which of :data:`TASKS`.
        minutes: within which all has to be done, loading included.
        workers: processes; 1 for this one.
        interim: where results go as they come; None for nowhere.
        resume: go on from what is there.
    """

    model: str
    entrants: tuple[Entrant, ...]
    missing: tuple[str, ...]
    tasks: tuple[str, ...]
    minutes: float
    workers: int
    interim: Interim | None
    resume: bool


def run(wish: Wish, tick: Callable[[str], None]) -> Record:
    """Measure until all is done or the time is up.

    Raises:
        InputError: what is to be continued is not there, or of another run.
    """
    start = time.monotonic()
    facts = {"model": wish.model, "tasks": list(wish.tasks), "python": platform.python_version()}
    known = wish.interim.read(facts) if wish.interim and wish.resume else []
    if wish.interim and not wish.resume:
        wish.interim.begin(facts)
    planned = visits(prompts_of(wish.tasks), LEVELS, lambda level: runs(wish.entrants, level), done(known))
    schedule = Schedule(list(planned), start + 60 * wish.minutes, wish.workers)
    found = list(known)
    for outcome in _outcomes(wish, schedule):
        found.append(outcome)
        if wish.interim:
            wish.interim.add(outcome)
        tick(f"{len(found)}: {outcome.prompt}, {len(outcome.scores)} policies")
    minutes = round((time.monotonic() - start) / 60, 1)
    told = {"minutes": minutes, "continued": wish.resume, "workers": wish.workers, "python": facts["python"]}
    told |= {"missing": wish.missing, "refused": refusals(found), "left_out": left_out(planned, found)}
    return Record({**provenance_of(wish), **told, "tokens": _tokens(found)}, rows_of(found, list(TASKS)))


def prompts_of(tasks: Sequence[str]) -> Iterator[Prompt]:
    """As many prompts as any level asks for."""
    for length in dict.fromkeys(level.length for level in LEVELS):
        count = max(level.prompts for level in LEVELS if level.length == length)
        for task in tasks:
            yield from TASKS[task](length, count)


def _outcomes(wish: Wish, schedule: Schedule) -> Iterator[Outcome]:
    make = work.in_parallel if wish.workers > 1 else work.in_turn
    return make(schedule, wish.model)


def provenance_of(wish: Wish) -> dict[str, Any]:
    """On what it was measured; workers have a thread each."""
    return provenance(load(wish.model)[0])


def left_out(planned: Sequence[Visit], found: Sequence[Outcome]) -> dict[str, str]:
    """How many prompts of each task lack a run that was planned, for want of time; by length and run."""
    measured = done(found)
    lacking: dict[str, Counter[str]] = {}
    for visit in planned:
        for run in visit.until(max(visit.runs)):
            if run.key not in measured.get(visit.prompt.key, ()):
                lacking.setdefault(f"{visit.prompt.length}/{run.key}", Counter())[visit.prompt.task] += 1
    return {key: ", ".join(f"{count} of {task}" for task, count in own.items()) for key, own in lacking.items()}


def refusals(found: Sequence[Outcome]) -> dict[str, str]:
    """Why policies could not be measured, by cell."""
    return {key: why for outcome in found for key, why in outcome.refused.items()}


def _tokens(found: Sequence[Outcome]) -> dict[str, list[int]]:
    """Least and most tokens that were compressed, by task, length and mode."""
    spans: dict[str, list[int]] = {}
    for outcome in found:
        for mode, tokens in outcome.tokens.items():
            key = "/".join((*outcome.prompt.split("/")[:2], mode))
            low, high = spans.get(key, [tokens, tokens])
            spans[key] = [min(low, tokens), max(high, tokens)]
    return spans
