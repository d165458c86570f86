"""Decode speed, side by side: caches take turns in one process, so that a noisy machine disturbs all alike."""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from qevict.hf.compat import CACHE_ARGUMENT


@attrs.frozen
class Pace:
    """Time of whole cycles relative to a baseline's, round by round.

    Attributes:
        ratio: median over rounds of own time / baseline's time; below 1 is faster.
        low: first quartile.
        high: third quartile.
    """

    ratio: float
    low: float
    high: float


def compare(model: Any, caches: Mapping[str, Any], *, rounds: int, cycle_tokens: int) -> dict[str, Pace]:
    """Decode ``rounds`` cycles with every cache in turn; the first cache is the baseline.

    Args:
        model: a model that a policy is attached to, if any cache needs one.
        caches: filled caches by name; they grow by ``rounds + 1`` cycles.
        rounds: cycles that count; one more comes before them to warm up.
        cycle_tokens: tokens of a cycle; the policies' period, so that routing and packing are included.
    """
    baseline = next(iter(caches))
    ratios: dict[str, list[float]] = {name: [] for name in caches}
    for turn in range(rounds + 1):
        seconds = {}
        for name, cache in caches.items():
            seconds[name] = _cycle(model, cache, cycle_tokens)
        if turn:
            for name, own in seconds.items():
                ratios[name].append(own / seconds[baseline])
    return {name: _pace(values) for name, values in ratios.items()}


def _pace(ratios: list[float]) -> Pace:
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Pace(middle, low, high)


@torch.no_grad()
def _cycle(model: Any, cache: Any, tokens: int) -> float:
    new = torch.full((1, 1), 11, device=model.device)
    start = time.perf_counter()
    for _ in range(tokens):
        new = _next(model, cache, new)
    if new.is_cuda:
        torch.cuda.synchronize(new.device)
    return time.perf_counter() - start


def _next(model: Any, cache: Any, new: Tensor) -> Tensor:
    logits: Tensor = model(new, use_cache=True, **{CACHE_ARGUMENT: cache}).logits
    return logits[:, -1].argmax(-1)[:, None]
