"""What routers are asked, as lists, and routing by loops over groups, tiers and heads."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction as Exact
from typing import NamedTuple

import torch

from qevict.contracts.router import Scope, TierRouter
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import PROTECTED, Costs, MovePlan, Windows

NO_LIMIT = 10**9


class Remaining(NamedTuple):
    """What is left of a group: by lane, its windows by position."""

    columns: list[list[int]]
    positions: list[list[int]]
    scores: dict[str, list[list[float]]]

    def order(self, lane: int, at: int) -> tuple[int, int]:
        """Of equal scores the earlier position wins, then the lower lane."""
        return self.positions[lane][at], lane


Rule = Callable[[Remaining, int], Sequence[Sequence[int]]]
"""Which of the remaining windows of each lane get one of so many slots, as indices."""


class Scene(NamedTuple):
    """One event: lanes of ``layers``, of each ``rows``, of each ``heads``; of each window by lane and column."""

    layers: int
    rows: int
    heads: int
    positions: list[list[int]]
    candidate: list[list[bool]]
    kept: list[list[list[bool]]] | None
    scores: Mapping[str, list[list[float]]]
    tier_bytes: tuple[int, ...]
    tenths: tuple[int, ...]
    capacities: tuple[int | None, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(tenth / 10 for tenth in self.tenths)

    def windows(self) -> Windows:
        candidate = torch.tensor(self.candidate, dtype=torch.bool).view(len(self.capacities), -1)
        return Windows(
            positions=torch.tensor(self.positions).view_as(candidate),
            present=candidate,
            candidate=candidate,
            place=torch.full_like(candidate, PROTECTED, dtype=torch.int64),
            candidates=tuple(map(sum, self.candidate)),
            lengths=torch.full((len(self.capacities),), 900),
            layers=self.layers,
            lanes_per_row=self.heads,
        )

    def ask(self, router: TierRouter) -> MovePlan:
        kept = None if self.kept is None else torch.tensor(self.kept, dtype=torch.bool)
        rankings = {name: torch.tensor(self.scores[name], dtype=torch.float32) for name in router.rankings}
        return router.plan(rankings, self.windows(), Costs(self.tier_bytes, kept), self.capacities)

    def groups(self, scope: Scope) -> list[list[int]]:
        """Lanes that share."""
        groups: dict[tuple[int, ...], list[int]] = {}
        every = itertools.product(range(self.layers), range(self.rows), range(self.heads))
        for index, (layer, row, head) in enumerate(every):
            owner = {"lane": (layer, row, head), "layer": (layer, row), "model": (row,)}[scope]
            groups.setdefault(owner, []).append(index)
        return [*groups.values()]

    def slots(self, lanes: Sequence[int], tier: int) -> int:
        limits = [self.capacities[lane] for lane in lanes]
        if None in limits:
            return NO_LIMIT if tier == 0 else 0
        share, cost = Exact(self.tenths[tier], 10), self.tier_bytes[tier]
        return int(share * sum(limit for limit in limits if limit is not None) // cost)

    def remaining(self, lanes: Sequence[int], place: list[list[int]]) -> Remaining:
        columns = [
            sorted(
                (column for column, own in enumerate(place[lane]) if own == len(self.tenths)),
                key=self.positions[lane].__getitem__,
            )
            for lane in lanes
        ]
        pairs = [*zip(lanes, columns, strict=True)]
        return Remaining(
            columns,
            [[self.positions[lane][column] for column in own] for lane, own in pairs],
            {
                name: [[table[lane][column] for column in own] for lane, own in pairs]
                for name, table in self.scores.items()
            },
        )


def layer_of(scores: Mapping[str, list[list[float]]], slots: int) -> Scene:
    """One row's heads in one layer, with room for so many tokens each; NaN stands for no window."""
    first = next(iter(scores.values()))
    return Scene(
        layers=1,
        rows=1,
        heads=len(first),
        positions=[[*range(len(own))] for own in first],
        candidate=[[not math.isnan(score) for score in own] for own in first],
        kept=None,
        scores=scores,
        tier_bytes=(1,),
        tenths=(10,),
        capacities=(slots,) * len(first),
    )


def kept(scene: Scene, router: TierRouter) -> list[list[int]]:
    """Positions of each lane in the only tier."""
    places = scene.ask(router).place.tolist()
    return [
        sorted(position for position, place in zip(*lane, strict=True) if place == 0)
        for lane in zip(scene.positions, places, strict=True)
    ]


def by_loop(scene: Scene, scope: Scope, start: Callable[[Remaining], Rule]) -> list[list[int]]:
    """Tier after tier, group by group; codes that windows of hotter tiers keep take slots of their tier.

    Args:
        scene: what is asked.
        scope: who shares.
        start: makes the rule of one group from all its candidates.
    """
    tiers = len(scene.tenths)
    place = [[tiers if candidate else PROTECTED for candidate in lane] for lane in scene.candidate]
    for lanes in scene.groups(scope):
        rule = start(scene.remaining(lanes, place))
        for tier in range(tiers):
            slots = scene.slots(lanes, tier) - billed(scene, lanes, place, tier)
            left = scene.remaining(lanes, place)
            for lane, columns, chosen in zip(lanes, left.columns, rule(left, max(slots, 0)), strict=True):
                for at in chosen:
                    place[lane][columns[at]] = tier
    return place


def billed(scene: Scene, lanes: Iterable[int], place: list[list[int]], tier: int) -> int:
    if scene.kept is None:
        return 0
    return sum(
        0 <= own < tier and codes[tier]
        for lane in lanes
        for own, codes in zip(place[lane], scene.kept[lane], strict=True)
    )


def scene_of(seed: int, rankings: Sequence[str] = (IMPORTANCE,), *, ties: bool = True) -> Scene:
    """Ragged candidates, lanes without any, tiers that fill or not, columns in any order."""
    chance = random.Random(seed)
    tiers, layers, rows, heads = chance.randint(1, 2), chance.randint(1, 2), chance.randint(1, 2), chance.randint(1, 4)
    tenths = (10,) if tiers == 1 else chance.choice([(3, 7), (5, 5), (0, 10)])
    tier_bytes = tuple(chance.randint(1, 12) for _ in range(tiers))
    lanes, columns = layers * rows * heads, chance.randint(1, 9)
    often = [chance.choice([0.0, 0.4, 1.0, 1.0]) for _ in range(lanes)]
    limits = [
        chance.choice([None, 0, *(chance.randint(0, columns * max(tier_bytes)) for _ in range(6))]) for _ in range(rows)
    ]
    return Scene(
        layers,
        rows,
        heads,
        [chance.sample(range(0, 8 * columns, 8), columns) for _ in range(lanes)],
        [[chance.random() < own for _ in range(columns)] for own in often],
        [[[False] + [chance.random() < 0.3] * (tiers - 1) for _ in range(columns)] for _ in range(lanes)]
        if chance.random() < 0.5
        else None,
        {name: [[score(chance, ties=ties) for _ in range(columns)] for _ in range(lanes)] for name in rankings},
        tier_bytes,
        tenths,
        tuple(limits[row] for _, row, _ in itertools.product(range(layers), range(rows), range(heads))),
    )


def score(chance: random.Random, *, ties: bool) -> float:
    """What fp32 resolves; often the same."""
    return chance.randint(0, 3) / 4 if ties and chance.random() < 0.7 else float(torch.tensor(chance.random()))
