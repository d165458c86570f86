"""Worker processes: each loads the model once and reads prompts on one thread."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from typing import Any

import torch

import qevict
from qevict import policies
from qevict.bench.models import load, quiet_libraries
from qevict.bench.zoo.field import Run
from qevict.bench.zoo.measure import Outcome, measure
from qevict.bench.zoo.plan import Schedule
from qevict.bench.zoo.prompts import Prompt

_held: dict[str, Any] = {}
"""In a worker: the session and the tokenizer, which every visit needs and no process can be sent."""

_attached = ExitStack()


def open_worker(model: str) -> None:
    """Load the model into this process."""
    torch.set_num_threads(1)
    quiet_libraries()
    loaded, tokenizer = load(model)
    _held["session"] = _attached.enter_context(qevict.attach(loaded, policies.full()))
    _held["tokenizer"] = tokenizer


def visit(prompt: Prompt, runs: tuple[Run, ...]) -> Outcome:
    """Measure in this process."""
    return measure(_held["session"], _held["tokenizer"], prompt, runs)


def in_turn(schedule: Schedule, model: str) -> Iterator[Outcome]:
    """Make the visits in this process, one after another."""
    open_worker(model)
    try:
        while (chosen := schedule.next()) is not None:
            own, runs = chosen
            yield _learned(schedule, own.prompt, visit(own.prompt, runs), len(runs))
    finally:
        _attached.close()
        _held.clear()


def in_parallel(schedule: Schedule, model: str) -> Iterator[Outcome]:
    """Make the visits in worker processes; a visit is chosen when somebody is free to make it."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(schedule.workers, context, open_worker, (model,)) as pool:
        running: dict[Future[Outcome], tuple[Prompt, int]] = {}
        while True:
            while len(running) < schedule.workers and (chosen := schedule.next()) is not None:
                running[pool.submit(visit, chosen[0].prompt, chosen[1])] = chosen[0].prompt, len(chosen[1])
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                prompt, runs = running.pop(future)
                yield _learned(schedule, prompt, future.result(), runs)


def _learned(schedule: Schedule, prompt: Prompt, outcome: Outcome, runs: int) -> Outcome:
    schedule.pace.learn(prompt.length, outcome.read_seconds, outcome.run_seconds, runs)
    return outcome
