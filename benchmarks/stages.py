"""Where the time of a decode step goes: by stage of the engine, and by operator of torch."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from qevict.engine.engine import Engine
from qevict.engine.layer import Layer

ATTENTION = "attention, masses included"

STAGES: dict[str, tuple[type, str]] = {
    "appending": (Layer, "append"),
    ATTENTION: (Engine, "_attend"),
    "scoring": (Engine, "_score"),
    "routing, moving and packing": (Engine, "route_together"),
}
"""Stages that do not contain each other, and the methods that they are."""


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Sum the seconds of every stage while the context lasts; a few microseconds a call are the watch's own."""
    spent, before = dict.fromkeys(STAGES, 0.0), {}
    try:
        for stage, (owner, method) in STAGES.items():
            before[stage] = getattr(owner, method)
            setattr(owner, method, _timed(before[stage], stage, spent))
        yield spent
    finally:
        for stage, original in before.items():
            setattr(*STAGES[stage], original)


def _timed(method: Callable[..., Any], stage: str, spent: dict[str, float]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent[stage] += time.perf_counter() - start

    return watched


WHOLE = "whole"


def stage_seconds(run: Callable[[], object]) -> dict[str, float]:
    """Seconds of ``run`` by stage, and of the whole: to be divided by each other, not to be told."""
    with stopwatch() as spent:
        start = time.perf_counter()
        run()
        return spent | {WHOLE: time.perf_counter() - start}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Shares of the whole, by stage; what remains is the model and the hand-over."""
    found = {stage: seconds[stage] / seconds[WHOLE] for stage in STAGES}
    return found | {"the model, and everything else": 1 - sum(found.values())}


def operator_shares(run: Callable[[], object], most: int = 12) -> dict[str, float]:
    """Shares of the time that torch's operators themselves take, the largest first."""
    with profile(activities=[ProfilerActivity.CPU]) as seen, torch.no_grad():
        run()
    own = {event.key: event.self_cpu_time_total for event in seen.key_averages()}
    whole = sum(own.values())
    ranked = sorted(own.items(), key=lambda item: -item[1])[:most]
    return {name: microseconds / whole for name, microseconds in ranked}
