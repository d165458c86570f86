"""What a router is asked, and how a lane's windows fare from event to event."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import attrs
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from qevict.contracts.values import PROTECTED, Costs, MovePlan, Windows
from qevict.testing.values import uniform

OptionT = TypeVar("OptionT")

POSITIONS = 8
"""First positions of windows are this far apart."""


@attrs.frozen
class Line:
    """One window of one lane.

    Attributes:
        window: its number, and so its position.
        scores: its score at each event; few values, so that many are equal.
        kind: whether it is ranked, protected, or filler.
    """

    window: int
    scores: tuple[float, ...]
    kind: str

    @property
    def position(self) -> int:
        """Its first position; filler claims any."""
        return 0 if self.kind == "absent" else 5 + POSITIONS * self.window


@attrs.frozen
class Setting:
    """A case worked out: what a router is asked at the first event, and at later ones about the windows that stayed.

    Attributes:
        tier_bytes: bytes of one window by tier.
        capacities: bytes of each lane; None for no limit.
        lanes: the windows of each lane, in the order of their columns.
    """

    tier_bytes: tuple[int, ...]
    capacities: tuple[int | None, ...]
    lanes: tuple[tuple[Line, ...], ...]

    @property
    def tiers(self) -> int:
        """How many tiers there are."""
        return len(self.tier_bytes)


EVENTS = 3
"""Events of a case."""


@attrs.frozen
class RouterCase:
    """How much a router is asked.

    Attributes:
        tiers: number of tiers.
        lanes: lanes of the layer.
        columns: windows of each lane, protected ones and filler included.
        seed: decides costs, capacities and scores.
    """

    tiers: int
    lanes: int
    columns: int
    seed: int

    def setting(self) -> Setting:
        """Capacities that fill some tiers and not others, another for each lane; many ties; columns in any order."""
        dice = iter(uniform(self.seed, 500).tolist())
        tier_bytes = tuple(_pick(dice, range(1, 41)) for _ in range(self.tiers))
        most = self.columns * max(tier_bytes)
        options, first = [None, most // 8, _pick(dice, range(most + 1)), most // 2], _pick(dice, range(4))
        capacities = [options[(first + lane) % len(options)] for lane in range(self.lanes)]
        return Setting(tier_bytes, tuple(capacities), tuple(_drawn_lane(dice, self.columns) for _ in capacities))


def cases_of(tiers: int) -> SearchStrategy[RouterCase]:
    """Cases with that many tiers."""
    return st.builds(RouterCase, st.just(tiers), st.integers(1, 3), st.integers(0, 8), st.integers(0, 1000))


def _drawn_lane(dice: Iterator[float], columns: int) -> tuple[Line, ...]:
    lines = [
        Line(
            window,
            tuple(_pick(dice, [0.0, 1.0, 2.0, -3.5, 1e6]) for _ in range(EVENTS)),
            _pick(dice, ["candidate", "candidate", "candidate", "candidate", "protected", "absent"]),
        )
        for window in range(columns)
    ]
    return tuple(lines.pop(_pick(dice, range(len(lines)))) for _ in range(columns))


def _pick(dice: Iterator[float], options: Sequence[OptionT]) -> OptionT:
    return options[int(next(dice) * len(options))]


@attrs.frozen
class Question:
    """One event of a case, as lists.

    Attributes:
        setting: the case, worked out.
        event: which of its events.
        place: place of every line before; the number of tiers for what is gone.
        held: whether a line holds codes of a tier, by lane, line and tier.
    """

    setting: Setting
    event: int
    place: list[list[int]]
    held: list[list[list[bool]]]

    def ranked(self, lane: int) -> list[int]:
        """Lines of a lane that are to be placed."""
        lines = self.setting.lanes[lane]
        return [
            i for i, line in enumerate(lines) if line.kind == "candidate" and self.place[lane][i] < self.setting.tiers
        ]

    def windows(self) -> Windows:
        """The rectangle of windows."""
        lanes = range(len(self.setting.lanes))
        ranked = [set(self.ranked(lane)) for lane in lanes]
        candidate = self._table(lambda lane, i: i in ranked[lane], torch.bool)
        return Windows(
            positions=self._table(lambda lane, i: self.setting.lanes[lane][i].position, torch.int64),
            present=candidate
            | self._table(lambda lane, i: self.setting.lanes[lane][i].kind == "protected", torch.bool),
            candidate=candidate,
            place=self._table(lambda lane, i: self.place[lane][i] if i in ranked[lane] else PROTECTED, torch.int64),
            candidates=tuple(map(len, ranked)),
            lengths=torch.tensor([max(line.position for line in lane) + POSITIONS for lane in self.setting.lanes]),
        )

    def scores(self) -> Tensor:
        """A score per window, fp32."""
        return self._table(lambda lane, i: self.setting.lanes[lane][i].scores[self.event], torch.float32)

    def costs(self) -> Costs:
        """Bytes by tier, and who keeps codes; None as long as nobody does."""
        tiers, held = self.setting.tiers, [owned for lane in self.held for owned in lane]
        if not any(itertools.chain.from_iterable(held)):
            return Costs(self.setting.tier_bytes)
        shape = (len(self.setting.lanes), len(self.setting.lanes[0]), tiers)
        return Costs(self.setting.tier_bytes, torch.tensor(held, dtype=torch.bool).view(shape))

    def planned_bytes(self, lane: int, places: Sequence[int]) -> int:
        """What a plan takes in a lane: each ranked window at its place, and the codes it keeps for colder tiers."""
        total, cost = 0, self.setting.tier_bytes
        for i in self.ranked(lane):
            if places[i] < self.setting.tiers:
                kept = [tier for tier in range(places[i] + 1, self.setting.tiers) if self.held[lane][i][tier]]
                total += cost[places[i]] + sum(cost[tier] for tier in kept)
        return total

    def after(self, plan: MovePlan) -> "Question":
        """The next event: codes stay with a window, those finer than its tier go, and evicted windows are gone."""
        places, held = plan.place.tolist(), [[list(owned) for owned in lane] for lane in self.held]
        place = [list(lane) for lane in self.place]
        for lane in range(len(self.setting.lanes)):
            for i in self.ranked(lane):
                place[lane][i] = new = places[lane][i]
                held[lane][i] = [
                    tier > 0 and (tier == new or (tier > new and owned)) for tier, owned in enumerate(held[lane][i])
                ]
        return Question(self.setting, self.event + 1, place, held)

    def _table(self, read: Callable[[int, int], object], dtype: torch.dtype) -> Tensor:
        lanes, columns = len(self.setting.lanes), len(self.setting.lanes[0])
        rows = [[read(lane, i) for i in range(columns)] for lane in range(lanes)]
        return torch.tensor(rows, dtype=dtype).view(lanes, columns)


def first_event(setting: Setting) -> Question:
    """The end of the prompt: whatever is ranked has just aged, and nothing owns codes."""
    place = [[PROTECTED] * len(lane) for lane in setting.lanes]
    held = [[[False] * setting.tiers for _ in lane] for lane in setting.lanes]
    return Question(setting, 0, place, held)
