"""What a router is asked, and how a lane's windows fare from event to event."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import attrs
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from qevict.contracts.router import Scope
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
        layers: layers whose lanes these are, one after another.
        heads: lanes of one row in one layer, one after another.
    """

    tier_bytes: tuple[int, ...]
    capacities: tuple[int | None, ...]
    lanes: tuple[tuple[Line, ...], ...]
    layers: int
    heads: int

    @property
    def tiers(self) -> int:
        """How many tiers there are."""
        return len(self.tier_bytes)

    def sharing(self, scope: Scope) -> list[list[int]]:
        """Lanes that share, group by group."""
        rows = len(self.lanes) // (self.layers * self.heads)
        groups: dict[int, list[int]] = {}
        for lane in range(len(self.lanes)):
            owner = {"lane": lane, "layer": lane // self.heads, "model": lane // self.heads % rows}[scope]
            groups.setdefault(owner, []).append(lane)
        return [*groups.values()]


EVENTS = 3
"""Events of a case."""


@attrs.frozen
class RouterCase:
    """How much a router is asked.

    Attributes:
        tiers: number of tiers.
        layers: layers that are routed together.
        rows: rows of each layer.
        heads: lanes of each row.
        columns: windows of each lane, protected ones and filler included.
        seed: decides costs, capacities and scores.
    """

    tiers: int
    layers: int
    rows: int
    heads: int
    columns: int
    seed: int

    def setting(self) -> Setting:
        """Capacities that fill some tiers and not others; many ties; columns in any order.

        Each row has others in each layer, or no limit in any.
        """
        dice = iter(uniform(self.seed, 500).tolist())
        tier_bytes = tuple(_pick(dice, range(1, 41)) for _ in range(self.tiers))
        most = self.columns * max(tier_bytes)
        limits, first = [most // 8, _pick(dice, range(most + 1)), most // 2], _pick(dice, range(4))
        capacities = [
            None if (first + row) % 4 == 0 else limits[(first + row + layer) % 3]
            for layer, row, _ in itertools.product(range(self.layers), range(self.rows), range(self.heads))
        ]
        lanes = tuple(_drawn_lane(dice, self.columns) for _ in capacities)
        return Setting(tier_bytes, tuple(capacities), lanes, self.layers, self.heads)


def cases_of(tiers: int) -> SearchStrategy[RouterCase]:
    """Cases with that many tiers."""
    few, columns, seed = st.integers(1, 2), st.integers(0, 8), st.integers(0, 1000)
    return st.builds(RouterCase, st.just(tiers), few, few, few, columns, seed)


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
            lengths=torch.tensor([5 + POSITIONS * (len(lane) + 1) for lane in self.setting.lanes]),
            layers=self.setting.layers,
            lanes_per_row=self.setting.heads,
        )

    def scores(self, ranking: int = 0) -> Tensor:
        """A score per window, fp32; others for each ranking of a scorer."""
        event = (self.event + ranking) % EVENTS
        return self._table(lambda lane, i: self.setting.lanes[lane][i].scores[event], torch.float32)

    def only(self, lanes: Sequence[int], scope: Scope) -> "Question":
        """What the lanes of one group would be asked if there were no others."""
        setting = attrs.evolve(
            self.setting,
            capacities=tuple(self.setting.capacities[lane] for lane in lanes),
            lanes=tuple(self.setting.lanes[lane] for lane in lanes),
            layers=self.setting.layers if scope == "model" else 1,
            heads=1 if scope == "lane" else self.setting.heads,
        )
        return Question(setting, self.event, [self.place[lane] for lane in lanes], [self.held[lane] for lane in lanes])

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
