"""Presets: each is the composition that its paper describes, and every option reaches its part."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qevict import policies
from qevict.contracts.budget import Bytes, Fraction
from qevict.errors import BudgetError, PolicyError
from qevict.ledgers.migration_stable import MigrationStable
from qevict.policies import evict_only, full, qevict, sinks_recent
from qevict.policy import Policy
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.cumulative import CumulativeAttention
from qevict.scorers.recency import Recency

Preset = Callable[..., Policy]
BUDGETED: tuple[Preset, ...] = (sinks_recent, evict_only, qevict)


def test_qevict_is_the_papers_composition() -> None:
    """arXiv 2608.05326: INT2, q = 0.70, windows and events of 8 tokens, 5 sinks, 32 recent."""
    policy = qevict("20 %")
    assert policy.scorer == CumulativeAttention(prompt_queries=None)
    assert isinstance(policy.router, GreedyTiers)
    assert policy.router.shares == pytest.approx((0.30, 0.70))
    assert [(tier.name, tier.codec) for tier in policy.tiers] == [
        ("full", None),
        ("int2", (PerChannel(2), PerToken(2))),
    ]
    assert policy.ledger == MigrationStable()
    assert (policy.window_tokens, policy.period_tokens, policy.sink_tokens, policy.recent_tokens) == (8, 8, 5, 32)
    assert (policy.budget, policy.granularity, policy.accounting) == (Fraction(0.2), "row", "exact")


def test_evict_only_is_qevict_without_its_recoverable_tier() -> None:
    policy, whole = evict_only("20 %"), qevict("20 %")
    assert policy.scorer == whole.scorer
    assert policy.router == GreedyTiers(shares=(1.0,))
    assert policy.tiers == whole.tiers[:1]
    assert (policy.window_tokens, policy.period_tokens, policy.sink_tokens, policy.recent_tokens) == (8, 8, 5, 32)
    assert policy.budget == whole.budget


def test_sinks_and_recent_rank_by_position() -> None:
    policy = sinks_recent("20 %")
    assert policy.scorer == Recency()
    assert [tier.codec for tier in policy.tiers] == [None]
    assert (policy.sink_tokens, policy.recent_tokens) == (5, 32)


def test_full_has_one_unbounded_dense_tier() -> None:
    policy = full()
    assert policy.budget is None
    assert [tier.codec for tier in policy.tiers] == [None]
    assert full(dtype=torch.bfloat16).dtype == torch.bfloat16


def test_presets_compare_and_hash_by_value() -> None:
    assert full() == full()
    assert hash(full()) == hash(full())
    for preset in BUDGETED:
        assert preset("20 %") == preset(Fraction(0.2))
        assert hash(preset("20 %")) == hash(preset(Fraction(0.2)))


def test_presets_differ_from_each_other() -> None:
    assert len({full(), sinks_recent("20 %"), evict_only("20 %"), qevict("20 %"), qevict("30 %")}) == 5


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bits_reach_both_quantizers_and_the_tiers_name(bits: int) -> None:
    tier = qevict("20 %", bits=bits).tiers[1]
    assert tier.name == f"int{bits}"
    assert tier.codec == (PerChannel(bits), PerToken(bits))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("share", [0, 0.0, 0.2, 0.7, 1, 1.0])
def test_the_share_reaches_the_router(share: float) -> None:
    router = qevict("20 %", quantized_share=share).router
    assert isinstance(router, GreedyTiers)
    assert router.shares == pytest.approx((1 - share, share))


@pytest.mark.parametrize("preset", [evict_only, qevict])
def test_options_reach_the_policy(preset: Preset) -> None:
    policy = preset(
        Bytes(1000),
        window_tokens=16,
        period_tokens=4,
        sink_tokens=2,
        recent_tokens=7,
        prompt_queries=32,
        dtype=torch.float16,
    )
    assert (policy.window_tokens, policy.period_tokens, policy.sink_tokens, policy.recent_tokens) == (16, 4, 2, 7)
    assert policy.scorer == CumulativeAttention(prompt_queries=32)
    assert policy.dtype == torch.float16
    assert policy.budget == Bytes(1000)


def test_options_of_the_other_presets_reach_them() -> None:
    policy = sinks_recent("20 %", sink_tokens=2, recent_tokens=7, dtype=torch.float16)
    assert (policy.sink_tokens, policy.recent_tokens, policy.dtype) == (2, 7, torch.float16)
    assert qevict("20 %", accounting="paper").accounting == "paper"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("preset", BUDGETED)
@pytest.mark.parametrize("budget", ["0 %", "101 %", "1.5", "-1 B", "much", 0.2, 20, 0, True, math.nan])
def test_what_is_no_budget_is_refused_by_every_preset(preset: Preset, budget: Any) -> None:
    with pytest.raises(BudgetError, match=r"allowed|budget=None"):
        preset(budget)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, math.inf, True, "0.7", None])
def test_an_impossible_share_is_refused_with_the_range(share: Any) -> None:
    with pytest.raises(PolicyError, match=r"quantized_share .*in \[0, 1\]; got"):
        qevict("20 %", quantized_share=share)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bits", [1, 5, 16, "2", 2.5, 0])
def test_unknown_bits_are_refused_with_the_known(bits: Any) -> None:
    with pytest.raises(PolicyError, match="allowed: 2, 3, 4, 8"):
        qevict("20 %", bits=bits)


def test_one_token_windows_need_another_quantizer() -> None:
    with pytest.raises(PolicyError, match=r"per_channel needs windows of at least 2 tokens.*use per_token or longer"):
        qevict("20 %", window_tokens=1)
    assert evict_only("20 %", window_tokens=1).window_tokens == 1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("preset", [evict_only, qevict])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("window_tokens", 0, "window_tokens must be a whole number of at least 1"),
        ("window_tokens", 7.5, "window_tokens must be a whole number of at least 1"),
        ("period_tokens", 0, "period_tokens must be a whole number of at least 1"),
        ("sink_tokens", -1, "sink_tokens must be a whole number of at least 0"),
        ("recent_tokens", -1, "recent_tokens must be a whole number of at least 0"),
        ("prompt_queries", 0, "prompt_queries is None"),
        ("dtype", torch.float64, "dtype=torch.float64 is not allowed; allowed"),
    ],
)
def test_impossible_options_are_refused(preset: Preset, option: str, value: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        preset("20 %", **{option: value})


def test_every_preset_is_found_by_its_name() -> None:
    functions = (
        each for each in vars(policies).values() if inspect.isfunction(each) and not each.__name__.startswith("_")
    )
    assert {each.__name__: each for each in functions if each.__module__ == policies.__name__} == dict(policies.PRESETS)
