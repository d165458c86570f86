"""Greedy tiers against an obvious loop, the laws of the router contract, and worked examples."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction as Exact
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qevict.contracts.budget import Bytes
from qevict.contracts.router import LayerBounds
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import PROTECTED, Costs, Geometry, MovePlan, Windows
from qevict.engine.wiring import Wiring
from qevict.errors import PolicyError
from qevict.policies import qevict
from qevict.routers.filling import rank_candidates
from qevict.routers.greedy import GreedyTiers

MIB = 2**20
LLAMA_8B = Geometry(layers=32, q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)


class Line(NamedTuple):
    """One column of one lane."""

    position: int
    score: float
    candidate: bool
    present: bool
    place: int
    kept: tuple[bool, ...]


class Case(NamedTuple):
    """What a router is asked."""

    tenths: tuple[int, ...]
    tier_bytes: tuple[int, ...]
    capacities: tuple[int | None, ...]
    lanes: tuple[tuple[Line, ...], ...]
    with_kept: bool

    @property
    def router(self) -> GreedyTiers:
        return GreedyTiers(shares=tuple(tenth / 10 for tenth in self.tenths))

    def room(self, lane: int, tier: int) -> int:
        """The floor of the paper's equations, in exact arithmetic."""
        capacity = self.capacities[lane]
        if capacity is None:
            return 10**9 if tier == 0 else 0
        return int(Exact(self.tenths[tier], 10) * capacity // self.tier_bytes[tier])


def windows_of(lanes: Sequence[Sequence[Line]]) -> Windows:
    def column(read: Callable[[Line], Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor([[read(line) for line in lane] for lane in lanes], dtype=dtype)

    return Windows(
        positions=column(lambda line: line.position, torch.int64),
        present=column(lambda line: line.present, torch.bool),
        candidate=column(lambda line: line.candidate, torch.bool),
        place=column(lambda line: line.place, torch.int64),
        candidates=tuple(sum(line.candidate for line in lane) for lane in lanes),
        lengths=torch.full((len(lanes),), 900),
    )


def ask(case: Case) -> MovePlan:
    scores = torch.tensor([[line.score for line in lane] for lane in case.lanes], dtype=torch.float32)
    kept = None
    if case.with_kept:
        shape = (*scores.shape, len(case.tenths))
        kept = torch.tensor([[line.kept for line in lane] for lane in case.lanes], dtype=torch.bool).view(shape)
    return case.router.plan({IMPORTANCE: scores}, windows_of(case.lanes), Costs(case.tier_bytes, kept), case.capacities)


def by_loop(case: Case) -> list[list[int]]:
    """In words: best first, earlier first among equals; kept codes take slots of the tier they belong to."""
    places = []
    for index, lane in enumerate(case.lanes):
        place = [line.place for line in lane]
        best = sorted(
            (column for column, line in enumerate(lane) if line.candidate),
            key=lambda column, lane=lane: (-lane[column].score, lane[column].position),  # type: ignore[misc]
        )
        for column in best:
            place[column] = len(case.tenths)
        for tier in range(len(case.tenths)):
            slots = case.room(index, tier)
            if case.with_kept:
                slots -= sum(
                    line.candidate and line.kept[tier] and place[column] < tier for column, line in enumerate(lane)
                )
            for column in best[: max(slots, 0)]:
                place[column] = tier
            best = best[max(slots, 0) :]
        places.append(place)
    return places


def case_of(seed: int) -> Case:
    """Tiers, sizes and capacities that fill some tiers and not others; many ties; columns in any order."""
    chance = random.Random(seed)
    tiers = chance.randint(1, 3)
    cuts = sorted(chance.randint(0, 10) for _ in range(tiers - 1))
    tenths = tuple(high - low for low, high in itertools.pairwise([0, *cuts, 10]))
    tier_bytes = tuple(chance.randint(1, 40) for _ in range(tiers))
    columns = chance.randint(0, 14)
    capacities = tuple(
        chance.choice([None, 0, chance.randint(0, 60), chance.randint(0, 12 * max(tier_bytes)), 10_000])
        for _ in range(chance.randint(1, 3))
    )
    lanes = tuple(tuple(lines(chance, columns, tiers)) for _ in capacities)
    return Case(tenths, tier_bytes, capacities, lanes, chance.random() < 0.6)


def lines(chance: random.Random, columns: int, tiers: int) -> Iterator[Line]:
    for index in chance.sample(range(columns), columns):
        kind = chance.choice(["candidate"] * 5 + ["protected", "absent"])
        candidate = kind == "candidate"
        score = float(chance.randint(0, 3)) if chance.random() < 0.7 else chance.uniform(-1e6, 1e6)
        yield Line(
            position=0 if kind == "absent" else 5 + 8 * index,
            # What fp32 resolves, so that the loop sees the ties that the router sees.
            score=float(torch.tensor(score, dtype=torch.float32)),
            candidate=candidate,
            present=kind != "absent",
            place=chance.randrange(tiers) if candidate else PROTECTED,
            kept=tuple(tier > 0 and candidate and chance.random() < 0.4 for tier in range(tiers)),
        )


CASES = st.integers(0, 2**31).map(case_of)


@given(CASES)
@settings(deadline=None, max_examples=300)
def test_the_plan_is_that_of_the_loop(case: Case) -> None:
    assert ask(case).place.tolist() == by_loop(case)


@given(CASES)
@settings(deadline=None, max_examples=200)
def test_laws_of_a_plan(case: Case) -> None:
    """One place for each candidate, all others where they were, true counts, bytes within the capacity."""
    plan = ask(case)
    tiers = len(case.tenths)
    assert (plan.counts is None) == case.with_kept
    for index, (lane, places) in enumerate(zip(case.lanes, plan.place.tolist(), strict=True)):
        for line, place in zip(lane, places, strict=True):
            assert place in range(tiers + 1) if line.candidate else place == line.place
        ranked = [(line, place) for line, place in zip(lane, places, strict=True) if line.candidate]
        counts = tuple(sum(place == tier for _, place in ranked) for tier in range(tiers))
        if plan.counts is not None:
            assert plan.counts[index] == counts
        capacity = case.capacities[index]
        # In the engine, codes never outnumber the slots of their tier: there or kept, they are billed alike.
        held = [sum(line.kept[tier] for line, _ in ranked) for tier in range(tiers)]
        reachable = all(count <= case.room(index, tier) for tier, count in enumerate(held))
        if capacity is None or (case.with_kept and not reachable):
            continue
        copies = [sum(line.kept[tier] and place < tier for line, place in ranked) for tier in range(tiers)]
        if not case.with_kept:
            copies = [0] * tiers
        bytes_by_tier = [
            (count + copy) * cost for count, copy, cost in zip(counts, copies, case.tier_bytes, strict=True)
        ]
        assert sum(bytes_by_tier) <= capacity
        for used, tenth in zip(bytes_by_tier, case.tenths, strict=True):
            assert used <= Exact(tenth, 10) * capacity


@given(CASES)
@settings(deadline=None, max_examples=60)
def test_lanes_are_strangers(case: Case) -> None:
    place = ask(case).place.tolist()
    for index, lane in enumerate(case.lanes):
        alone = case._replace(lanes=(lane,), capacities=(case.capacities[index],))
        assert ask(alone).place.tolist() == [place[index]]


def simple(scores: Sequence[float], *, positions: Sequence[int] | None = None, fixed: Sequence[int] = ()) -> Windows:
    """Candidates of one lane in ascending position; those of ``fixed`` are protected."""
    columns = range(len(scores))
    return windows_of(
        [
            [
                Line(positions[column] if positions else 8 * column, scores[column], column not in fixed, True, -1, ())
                for column in columns
            ]
        ]
    )


def test_kept_codes_take_slots_of_the_tier_that_they_belong_to() -> None:
    """Room for 2 + 3 windows; the best window still owns codes, so that only two others fit beside them."""
    router, windows, scores = GreedyTiers(shares=(0.4, 0.6)), simple([0.0] * 7), torch.arange(7.0, 0, -1)[None]
    kept = torch.zeros(1, 7, 2, dtype=torch.bool)
    assert router.plan({IMPORTANCE: scores}, windows, Costs((10, 10), kept), [50]).place.tolist() == [
        [0, 0, 1, 1, 1, 2, 2]
    ]
    kept[0, [0, 3, 6], 1] = True
    plan = router.plan({IMPORTANCE: scores}, windows, Costs((10, 10), kept), [50])
    assert plan.place.tolist() == [[0, 0, 1, 1, 2, 2, 2]]
    assert plan.counts is None


def test_all_equal_scores_keep_the_earliest_whatever_their_columns() -> None:
    windows = simple([1.0] * 5, positions=[32, 8, 24, 0, 16])
    place = GreedyTiers(shares=(0.5, 0.5)).plan({IMPORTANCE: torch.ones(1, 5)}, windows, Costs((10, 10)), [40]).place
    assert place.tolist() == [[2, 0, 1, 0, 1]]


@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min])
def test_a_candidate_with_the_lowest_score_is_placed_while_there_is_room(lowest: float) -> None:
    """What may not be ranked must not stand before it, and counts that the router promises must be true."""
    windows = simple([5.0, lowest, 4.0], fixed=[0])
    scores = torch.tensor([[5.0, lowest, 4.0]])
    plan = GreedyTiers().plan({IMPORTANCE: scores}, windows, Costs((10,)), [20])
    assert plan.place.tolist() == [[PROTECTED, 0, 0]]
    assert plan.counts == ((2,),)


def test_scores_that_differ_by_less_than_16_bits_resolve_are_told_apart() -> None:
    """C15: ties of bf16 are not ties of fp32."""
    scores = torch.tensor([[1.0, 1.0 + 2**-20, 1.0 + 2**-21]])
    assert scores.bfloat16().unique().numel() == 1
    assert rank_candidates(scores, simple([0.0] * 3)).tolist() == [[2, 0, 1]]


def test_no_limit_keeps_everything_in_the_hottest_tier() -> None:
    windows = simple([3.0, 1.0, 2.0])
    plan = GreedyTiers(shares=(0.3, 0.7)).plan({IMPORTANCE: torch.rand(1, 3)}, windows, Costs((10, 3)), [None])
    assert plan.place.tolist() == [[0, 0, 0]]
    assert plan.counts == ((3, 0),)


def test_nothing_fits_into_nothing() -> None:
    plan = GreedyTiers(shares=(0.3, 0.7)).plan({IMPORTANCE: torch.rand(1, 3)}, simple([0.0] * 3), Costs((10, 3)), [0])
    assert plan.place.tolist() == [[2, 2, 2]]
    assert plan.counts == ((0, 0),)


# ── The routing example of the QEvict study: six windows, two slots in each of two tiers ───────────


def tiers_of(plan: MovePlan, identities: Sequence[int]) -> tuple[set[int], set[int], set[int]]:
    places = plan.place[0].tolist()
    full, recoverable, evicted = (
        {name for name, place in zip(identities, places, strict=True) if place == tier} for tier in range(3)
    )
    return full, recoverable, evicted


def test_the_routing_example() -> None:
    router, costs = GreedyTiers(shares=(0.5, 0.5)), Costs((10, 10))
    scores = [9.0, 1.0, 5.0, 7.0, 3.0, 2.0]
    first = router.plan({IMPORTANCE: torch.tensor([scores])}, simple(scores), costs, [40])
    assert tiers_of(first, range(6)) == ({0, 3}, {2, 4}, {1, 5})
    assert first.counts == ((2, 2),)
    # At the next event 1 and 5 are gone for good, 6 and 7 have aged, and 4 has woken up.
    identities, scores = [0, 2, 3, 4, 6, 7], [10.0, 5.5, 7.2, 8.4, 1.0, 6.0]
    windows = simple(scores, positions=[8 * name for name in identities])
    second = router.plan({IMPORTANCE: torch.tensor([scores])}, windows, costs, [40])
    assert tiers_of(second, identities) == ({0, 4}, {3, 7}, {2, 6})


# ── The paper's byte example: 100 MiB, q = 0.70, Llama-3.1-8B, windows of 8, 5 % for scales ────────


def paper_wiring() -> Wiring:
    return Wiring(qevict(Bytes(100 * MIB), accounting="paper"), LLAMA_8B, None)


def test_bytes_of_the_papers_example() -> None:
    wiring = paper_wiring()
    assert LLAMA_8B.layers * wiring.paper_bytes(0) == MIB
    assert wiring.tier_bytes == (wiring.paper_bytes(0), wiring.paper_bytes(1)) == (32768, 4301)
    # 2/16 of the dense bytes and 5 % more, over all layers: about 0.131 MB in the worked example.
    assert LLAMA_8B.layers * wiring.paper_bytes(1) / MIB == pytest.approx(0.131, abs=5e-4)


def test_exact_bytes_of_the_same_windows() -> None:
    wiring = Wiring(qevict(Bytes(100 * MIB)), LLAMA_8B, None)
    assert wiring.block_bytes == (32768, 8448)
    flags = (8, 1)  # for each token of a dense slot, and for each encoded slot
    assert wiring.tier_bytes == (32768 + flags[0] + wiring.record_bytes, 8448 + flags[1] + wiring.record_bytes)


def test_windows_of_the_papers_example() -> None:
    wiring = paper_wiring()
    router = wiring.policy.router
    assert isinstance(router, GreedyTiers)
    by_layer = router.share(100 * MIB, LLAMA_8B, LayerBounds(0, 100 * MIB))
    assert by_layer == (100 * MIB // 32,) * 32
    assert router.fits(by_layer[0], wiring.tier_bytes) == (30, 533)
    # With the rounded 0.131 MB of the worked example, 534.
    assert router.fits(100_000_000, (1_000_000, 131_000)) == (30, 534)
    scores = torch.rand(1, 700, generator=torch.Generator().manual_seed(0))
    plan = router.plan({IMPORTANCE: scores}, simple([0.0] * 700), Costs(wiring.tier_bytes), by_layer[:1])
    assert plan.counts == ((30, 533),)
    assert [int((plan.place == tier).sum()) for tier in range(3)] == [30, 533, 700 - 563]
    assert float(scores[plan.place == 0].min()) >= float(scores[plan.place == 1].max())
    assert float(scores[plan.place == 1].min()) >= float(scores[plan.place == 2].max())


@pytest.mark.parametrize(
    ("evictable_tokens", "quantized_share", "expected"), [(71, 0.7, (2, 24)), (782, 0.7, (29, 265)), (71, 0.2, (7, 6))]
)
def test_windows_of_checked_budgets(evictable_tokens: int, quantized_share: float, expected: tuple[int, int]) -> None:
    """A fifth of 1024 tokens less 5 sinks and 128 recent ones, or of 4096 less 5 and 32; Llama-3.1-8B, INT2."""
    router, token_bytes = GreedyTiers((1 - quantized_share, quantized_share)), LLAMA_8B.token_bytes
    assert router.fits(evictable_tokens * token_bytes, (32768, 8448)) == expected
    assert GreedyTiers((1.0,)).fits(evictable_tokens * token_bytes, (32768,)) == (evictable_tokens // 8,)


@given(st.integers(0, 10), st.integers(0, 10**5), st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 99))
def test_windows_that_fit_are_the_floor_of_the_exact_share(
    tenths: int, count: int, hot: int, cold: int, rest: int
) -> None:
    """Shares such as 0.3 and 0.7 are not binary fractions; a slot may neither be lost nor won by that."""
    router, capacity = GreedyTiers(shares=(1 - tenths / 10, tenths / 10)), count * min(hot, cold) + rest
    expected = (int(Exact(10 - tenths, 10) * capacity // hot), int(Exact(tenths, 10) * capacity // cold))
    assert router.fits(capacity, (hot, cold)) == expected


@given(st.integers(0, 2**50), st.integers(1, 200))
def test_layers_share_equally_and_never_more_than_there_is(total: int, layers: int) -> None:
    geometry = Geometry(layers, q_heads=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    shares = GreedyTiers().share(total, geometry, LayerBounds(0, total))
    assert len(shares) == layers
    assert len(set(shares)) == 1
    assert total - layers < sum(shares) <= total


# ── Refusals ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shares", [(), (0.5,), (0.5, 0.6), (1.5, -0.5), (-1.0, 2.0), (math.nan, 1.0), (math.inf, 0.0)])
def test_shares_that_do_not_share_everything_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(PolicyError, match="none negative, sum 1; got"):
        GreedyTiers(shares=shares)


def test_another_number_of_tiers_is_refused_with_the_remedy() -> None:
    router = GreedyTiers(shares=(0.3, 0.7))
    router.check(2)
    for tiers in (1, 3):
        with pytest.raises(PolicyError, match=f"2 shares .* for {tiers} tiers; give one share per tier"):
            router.check(tiers)


def test_routers_are_values() -> None:
    assert GreedyTiers(shares=(0.3, 0.7)) == GreedyTiers(shares=[0.3, 0.7])
    assert hash(GreedyTiers()) == hash(GreedyTiers(shares=(1.0,)))
    assert GreedyTiers() != GreedyTiers(shares=(0.3, 0.7))
