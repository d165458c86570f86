"""Parts that break their contracts are refused by name, where their answer is first seen."""

from typing import Any, ClassVar

import attrs
import pytest
import torch
from tests.oracle import prompts, tiny

import qevict
from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import Scorer
from qevict.contracts.values import MovePlan
from qevict.errors import ContractError
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policies import evict_only
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.recency import Recency
from qevict_baselines.snapkv import PooledHeads

GREEDY = GreedyTiers()


@attrs.frozen
class Says(TierRouter):
    """Answers as the test wishes."""

    name: ClassVar[str] = "says"
    wish: Any = None
    parts: Any = None

    def check(self, tiers: int) -> None:
        """Any."""

    def share(self, total_bytes: int, geometry: Any, bounds: Any) -> Any:
        """As wished."""
        return GREEDY.share(total_bytes, geometry, bounds) if self.parts is None else self.parts(total_bytes)

    def plan(self, rankings: Any, windows: Any, costs: Any, capacities: Any) -> Any:
        """As wished."""
        plan = GREEDY.plan(rankings, windows, costs, capacities)
        return plan if self.wish is None else self.wish(plan)


def read(**parts: Any) -> None:
    policy = attrs.evolve(evict_only("60 %", sink_tokens=0, recent_tokens=1), **parts)
    with qevict.attach(tiny(num_hidden_layers=2), policy) as session:
        session.prefill(prompts(40)[0])


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (lambda _: None, "'says' must return a MovePlan, got a NoneType"),
        (lambda plan: plan.place, "must return a MovePlan, got a Tensor"),
        (lambda plan: MovePlan(plan.place[:, :1]), r"must give each window a tier, whole numbers \(1, \d+\)"),
        (lambda plan: MovePlan(plan.place.float()), "must give each window a tier, .*torch.float32"),
        (lambda plan: MovePlan(plan.place, ((1, 2),)), "must count by lane and tier, 1 times 1"),
        (lambda plan: MovePlan(plan.place, ()), "must count by lane and tier"),
    ],
)
def test_a_plan_that_is_none_is_refused(wish: Any, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        read(router=Says(wish))


@pytest.mark.parametrize(
    "parts",
    [lambda n: (n,), lambda n: (-5, n), lambda n: (n / 2, n / 2), lambda n: (n, n), lambda _: 7],
    ids=["too few", "negative", "broken", "too many bytes", "a number"],
)
def test_parts_that_do_not_split_the_bytes_are_refused(parts: Any) -> None:
    with pytest.raises(ContractError, match=r"'says' must split \d+ bytes into 2 whole numbers"):
        read(router=Says(parts=parts))


@attrs.frozen
class Odd(Scorer):
    """Starts and ranks as the test wishes."""

    name: ClassVar[str] = "odd"
    first: Any = None
    ranks: Any = None

    def start(self, lanes: int, windows: int, device: torch.device) -> Any:
        """As wished."""
        return {} if self.first is None else self.first(lanes, windows)

    def update(self, state: Any, observation: Any) -> Any:
        """Nothing."""
        return state

    def rank(self, state: Any, windows: Any) -> Any:
        """As wished."""
        return Recency().rank(state, windows) if self.ranks is None else self.ranks(windows.positions.float())


@pytest.mark.parametrize(
    ("scorer", "said"),
    [
        (Odd(first=lambda *_: 7), "'odd' must return a state"),
        (Odd(first=lambda lanes, _: {"a": torch.zeros(lanes)}), "'odd' must keep its state in float32, over lanes"),
        (Odd(first=lambda *axes: {"a": torch.zeros(axes).half()}), "'odd' must keep its state in float32"),
        (Odd(ranks=lambda _: None), "'odd' must return rankings by name"),
        (Odd(ranks=lambda scores: scores), "'odd' must return rankings by name"),
        (Odd(ranks=lambda scores: {"importance": scores[:, 0]}), "'odd' must rank in float32"),
        (Odd(ranks=lambda scores: {"importance": scores.double()}), "'odd' must rank in float32"),
    ],
)
def test_a_scorer_that_starts_or_ranks_oddly_is_refused_before_any_token(scorer: Any, said: str) -> None:
    policy = attrs.evolve(evict_only("60 %"), scorer=scorer)
    with pytest.raises(ContractError, match=said), qevict.attach(tiny(num_hidden_layers=2), policy):
        pass


def test_queries_that_wait_for_the_prompts_end_are_among_the_kinds_of_bytes() -> None:
    policy = attrs.evolve(evict_only("60 %"), scorer=PooledHeads(8))
    with qevict.attach(tiny(num_hidden_layers=2), policy) as session:
        cache = session.cache()
        cache.expect(40)
        session.model(prompts(38)[0], **{CACHE_ARGUMENT: cache})
        report = cache.report()
        assert report.exact_bytes == sum(report.bytes_by_kind.values())
        assert report.bytes_by_kind["waiting queries"] > 2 * 6 * 4 * 16 * 4
