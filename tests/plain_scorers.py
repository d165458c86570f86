"""Scorers whose ranks plain Python can recompute exactly: whole numbers throughout. Also a plugin that offers them."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.registry import hookimpl
from tests.plain_rows import Row, Rules


@attrs.frozen
class Shuffled(Scorer):
    """Ranks by position, in a shuffled order with ties. Remembers nothing."""

    name: ClassVar[str] = "shuffled"

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        return {}

    def update(self, state: State, observation: Observation) -> State:
        return state

    def rank(self, state: State, windows: Windows) -> Mapping[str, Tensor]:
        return {IMPORTANCE: (windows.positions * 29 % 31).float()}


def shuffled(rules: Rules, row: Row, layer: int, head: int, window: int) -> int:
    """What :class:`Shuffled` says."""
    return rules.first(window) * 29 % 31


@attrs.frozen
class Turning(Scorer):
    """Ranks by the keys and by how many tokens have come since, so that ranks turn over from event to event."""

    name: ClassVar[str] = "turning"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.KEYS})

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        return {name: torch.zeros(lanes, windows, dtype=torch.float32, device=device) for name in ("marks", "turns")}

    def update(self, state: State, observation: Observation) -> State:
        assert observation.keys is not None
        marks = state["marks"] + observation.sum_by_window(marks_of(observation.keys)[:, 0])
        came = (observation.columns >= 0).sum(1, keepdim=True)
        new = observation.sum_by_window(torch.ones_like(observation.columns)) > 0
        return {"marks": marks, "turns": state["turns"] + came * (new | (state["turns"] > 0))}

    def rank(self, state: State, windows: Windows) -> Mapping[str, Tensor]:
        return {IMPORTANCE: (state["marks"] + 5 * state["turns"]).remainder(23)}


def marks_of(keys: Tensor) -> Tensor:
    """A whole number from each key."""
    return (keys[..., 0] * 16).floor()


def turning(rules: Rules, row: Row, layer: int, head: int, window: int) -> int:
    """What :class:`Turning` says."""
    marks = int(marks_of(row.keys[layer][head, rules.span(window)]).sum())
    return (marks + 5 * row.turns[window]) % 23


@hookimpl
def qevict_scorers() -> Iterable[type[Scorer]]:
    return [Shuffled, Turning]
