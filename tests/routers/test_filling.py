"""Groups of lanes, ranks in them, and the loop over tiers, against lists."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, get_args

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.baselines.slow.basics import top_flat
from tests.routers.by_loop import Remaining, Rule, Scene, by_loop, scene_of
from torch import Tensor

from qevict.contracts.router import Scope, TierRouter
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Costs, MovePlan, Windows
from qevict.errors import ContractError, PolicyError
from qevict.routers.filling import best, fill, rank_candidates, top_up
from qevict.routers.greedy import GreedyTiers
from qevict.routers.sharing import UNLIMITED, Groups, part_of

SCOPES: tuple[Scope, ...] = get_args(Scope)
SCENES = st.integers(0, 2**31).map(scene_of)
TWO_BY_TWO = Scene(
    layers=2,
    rows=2,
    heads=2,
    positions=[[0, 8]] * 8,
    candidate=[[True, True]] * 8,
    kept=None,
    scores={IMPORTANCE: [[float(lane), 0.5] for lane in range(8)]},
    tier_bytes=(10,),
    tenths=(10,),
    capacities=(10,) * 8,
)
"""Lanes: layer 0 has rows (0, 1) and (2, 3), layer 1 (4, 5) and (6, 7)."""


def greedy(_: Remaining) -> Rule:
    return lambda left, slots: top_flat(left.scores[IMPORTANCE], slots, left.order)


@pytest.mark.parametrize("scope", SCOPES)
@given(SCENES)
@settings(deadline=None, max_examples=60)
def test_the_best_of_those_that_share_is_that_of_the_loop(scope: Scope, scene: Scene) -> None:
    assert scene.ask(GreedyTiers(scene.shares, scope)).place.tolist() == by_loop(scene, scope, greedy)


@pytest.mark.parametrize(
    ("scope", "members"),
    [
        ("lane", [[lane] for lane in range(8)]),
        ("layer", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("model", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_who_shares(scope: Scope, members: list[list[int]]) -> None:
    groups = Groups(TWO_BY_TWO.windows(), scope)
    lanes = torch.arange(8)[:, None].expand(8, 2)
    assert groups.gather(lanes)[..., 0].tolist() == members
    assert groups.spread(groups.gather(lanes)).equal(lanes)
    assert groups.members(range(8)) == members


def test_lanes_that_share_put_their_bytes_together_before_windows_are_counted() -> None:
    groups = Groups(TWO_BY_TWO.windows(), "layer")
    assert groups.room([15] * 8, (10, 5), (0.5, 0.5)) == ((1, 3),) * 4
    assert Groups(TWO_BY_TWO.windows(), "lane").room([15] * 8, (10, 5), (0.5, 0.5)) == ((0, 1),) * 8


def test_no_limit_for_one_is_none_for_all() -> None:
    groups = Groups(TWO_BY_TWO.windows(), "layer")
    assert groups.room([None, 30] * 4, (10, 5), (0.5, 0.5)) == ((UNLIMITED, 0),) * 4


def test_ties_go_to_the_earlier_position_and_then_to_the_lower_lane() -> None:
    windows = TWO_BY_TWO.windows()
    equal = torch.zeros(8, 2)
    assert rank_candidates(equal, windows, "layer").tolist() == [[0, 2, 1, 3]] * 4
    assert rank_candidates(equal, windows, "model").tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]] * 2


@pytest.mark.parametrize("scope", SCOPES)
def test_no_filler_outranks_a_candidate(scope: Scope) -> None:
    windows = TWO_BY_TWO._replace(candidate=[[False, True]] * 8).windows()
    ranks = Groups(windows, scope).gather(rank_candidates(torch.tensor([[9.0, -torch.inf]] * 8), windows))
    assert ranks[..., 1].tolist() == torch.zeros_like(ranks[..., 1]).tolist()
    together = rank_candidates(torch.tensor([[9.0, torch.nan]] * 8), windows, scope)
    assert bool((together[:, 1::2].amax(1) < together[:, ::2].amin(1)).all())


def test_the_best_of_each_member_and_of_all() -> None:
    among = torch.tensor([[[True, True, False], [True, True, True]]])
    alone, together = torch.tensor([[[2, 1, 0], [0, 1, 2]]]), torch.tensor([[3, 1, 0, 2, 4, 5]])
    assert best(alone, among, torch.tensor([[1, 2]])).tolist() == [[[False, True, False], [True, True, False]]]
    assert best(together, among, torch.tensor([2])).tolist() == [[[False, True, False], [True, False, False]]]
    assert not best(together, among, torch.tensor([-1])).any()
    chosen = torch.tensor([[[True, False, False], [False, False, False]]])
    assert top_up(chosen, together, among, torch.tensor([2])).tolist() == [[[True, True, False], [False] * 3]]
    assert top_up(chosen, alone, among, torch.tensor([[0, 1]])).tolist() == [
        [[True, False, False], [True, False, False]]
    ]


def test_kept_codes_take_a_slot_of_whoever_shares() -> None:
    """Room for one window of each lane in each tier; a window of lane 0 keeps codes, so lane 1 gets one less."""
    scene = TWO_BY_TWO._replace(layers=1, rows=1, positions=[[0, 8]] * 2, candidate=[[True, True]] * 2)
    scene = scene._replace(
        tier_bytes=(5, 5), tenths=(5, 5), capacities=(10, 10), scores={IMPORTANCE: [[9.0, 1.0], [8.0, 2.0]]}
    )
    router = GreedyTiers((0.5, 0.5), "layer")
    assert scene.ask(router).place.tolist() == [[0, 1], [0, 1]]
    keeps = scene._replace(kept=[[[False, True], [False, False]], [[False, False], [False, False]]])
    assert keeps.ask(router).place.tolist() == [[0, 2], [0, 1]]
    assert keeps.ask(GreedyTiers((0.5, 0.5))).place.tolist() == [[0, 2], [0, 1]]
    other = keeps._replace(scores={IMPORTANCE: [[9.0, 2.0], [8.0, 1.0]]})
    assert other.ask(router).place.tolist() == [[0, 1], [0, 2]]
    assert other.ask(GreedyTiers((0.5, 0.5))).place.tolist() == [[0, 2], [0, 1]]


@attrs.frozen
class Latest(TierRouter):
    """A rule of one's own: later positions first, and never more than one of a lane."""

    name: ClassVar[str] = "latest"
    scope = "layer"

    def check(self, tiers: int) -> None: ...

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        groups = Groups(windows, self.scope)
        alone = groups.gather(rank_candidates(windows.positions.float(), windows))
        together = rank_candidates(rankings[IMPORTANCE], windows, self.scope)

        def choose(remaining: Tensor, slots: Tensor) -> Tensor:
            return best(together, best(alone, remaining, torch.ones_like(remaining[..., 0], dtype=torch.int64)), slots)

        return MovePlan(fill(groups, costs, [(len(own),) for own in groups.members(capacities)], choose))


def test_a_rule_of_ones_own() -> None:
    assert TWO_BY_TWO.ask(Latest()).place.tolist() == [[1, 0]] * 8
    scene = TWO_BY_TWO._replace(positions=[[8, 0], [0, 8]] * 4)
    assert scene.ask(Latest()).place.tolist() == [[0, 1], [1, 0]] * 4


@pytest.mark.parametrize(
    ("slots", "share", "part"),
    [(10, 0.2, 2), (5, 0.2, 1), (10, 0.7, 7), (9, 1 / 3, 3), (3, 0.5, 1), (UNLIMITED, 1.0, UNLIMITED)],
)
def test_parts_of_slots_are_those_of_the_fraction_that_is_meant(slots: int, share: float, part: int) -> None:
    assert part_of(torch.tensor([slots]), share).tolist() == [part]


def test_a_ranking_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ContractError, match=r"router 'greedy' reads the ranking 'importance', the scorer offers \['x'\]"
    ):
        GreedyTiers().plan({"x": torch.zeros(8, 2)}, TWO_BY_TWO.windows(), Costs((10,)), [10] * 8)


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(PolicyError, match="one of 'lane', 'layer', 'model'; got 'row'"):
        GreedyTiers(scope="row")  # type: ignore[arg-type]


def test_only_lanes_that_do_not_share_are_counted_on_the_host() -> None:
    assert TWO_BY_TWO.ask(GreedyTiers()).counts == ((1,),) * 8
    assert TWO_BY_TWO.ask(GreedyTiers(scope="layer")).counts is None
