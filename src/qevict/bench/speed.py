"""Time, side by side: contestants take turns in one process, so that a noisy machine disturbs all alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from qevict.hf.compat import CACHE_ARGUMENT

Runners = Mapping[str, Callable[[], object]]
"""What each contestant does in a round, by name."""

Round = Mapping[str, float]
"""Seconds of each contestant in one round. They mean something only beside each other."""


@attrs.frozen
class Pace:
    """Time relative to a baseline's, over paired rounds; below 1 is faster.

    Attributes:
        ratio: median over rounds of own time / baseline's time.
        low: first quartile of these ratios.
        high: third quartile.
        p95: 95th percentile; with few rounds hardly less than the worst of them.
        least: own fastest round / the baseline's fastest round, which noise cannot make smaller for both at once.
    """

    ratio: float
    low: float
    high: float
    p95: float
    least: float


def take_turns(runners: Runners, turn: int, before: Callable[[str], object] = str) -> dict[str, float]:
    """Play one round: every contestant once; each round another one is the first.

    Args:
        runners: contestants.
        turn: number of the round.
        before: called with the name before each contestant; not timed.

    Returns:
        Seconds by name, in the order of ``runners``.
    """
    names = list(runners)
    first = turn % len(names)
    seconds = {}
    for name in names[first:] + names[:first]:
        before(name)
        start = time.perf_counter()
        runners[name]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start
    return {name: seconds[name] for name in names}


def paces(rounds: Sequence[Round], baseline: str) -> dict[str, Pace]:
    """Every contestant's time relative to the baseline's."""
    return {name: pace([each[name] for each in rounds], [each[baseline] for each in rounds]) for name in rounds[0]}


def pace(own: Sequence[float], theirs: Sequence[float]) -> Pace:
    """Own seconds relative to another's, paired by round."""
    ratios = torch.tensor([mine / other for mine, other in zip(own, theirs, strict=True)], dtype=torch.float64)
    low, middle, high, p95 = torch.quantile(ratios, torch.tensor([0.25, 0.5, 0.75, 0.95]).double()).tolist()
    return Pace(middle, low, high, p95, min(own) / min(theirs))


def compare(model: Any, caches: Mapping[str, Any], *, rounds: int, cycle_tokens: int) -> dict[str, Pace]:
    """Decode ``rounds`` cycles with every cache in turn; the first cache is the baseline.

    Args:
        model: a model that a policy is attached to, if any cache needs one.
        caches: filled caches by name; they grow by ``rounds + 1`` cycles.
        rounds: cycles that count; one more comes before them to warm up.
        cycle_tokens: tokens of a cycle; the policies' period, so that routing and packing are included.
    """
    runners = {name: _decoder(model, cache, cycle_tokens) for name, cache in caches.items()}
    played = [take_turns(runners, turn) for turn in range(rounds + 1)]
    return paces(played[1:], next(iter(caches)))


def _decoder(model: Any, cache: Any, tokens: int) -> Callable[[], None]:
    def run() -> None:
        new = torch.full((1, 1), 11, device=model.device)
        for _ in range(tokens):
            new = next_tokens(model, cache, new)

    return run


@torch.no_grad()
def next_tokens(model: Any, cache: Any, new: Tensor, **given: Any) -> Tensor:
    """One forward over what is new, greedily: ``[rows, tokens]`` in, ``[rows, 1]`` out.

    Args:
        model: the model.
        cache: what it goes on from.
        new: token ids.
        **given: mask and positions, where rows differ in length.
    """
    logits: Tensor = model(new, use_cache=True, logits_to_keep=1, **given, **{CACHE_ARGUMENT: cache}).logits
    return logits[:, -1].argmax(-1)[:, None]
