"""A policy is a value that refuses what cannot work, naming the part and the remedy."""

import copy
import re
from typing import Any, ClassVar

import attrs
import pytest
import torch

from qevict.backends.reference import ReferenceAttention
from qevict.contracts.backend import Attended, AttentionBackend, Query, View
from qevict.contracts.budget import Bytes, Fraction, Tokens
from qevict.contracts.store import Pool, Store
from qevict.contracts.values import Layout, Need
from qevict.errors import BudgetError, PolicyError, QevictError
from qevict.ledgers.migration_stable import MigrationStable
from qevict.policies import qevict
from qevict.policy import Policy, Tier
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.cumulative import CumulativeAttention
from qevict.scorers.recency import Recency
from qevict.shapes import Mass
from qevict.stores.memory import DeviceMemory

FULL = Tier("full", store=DeviceMemory())
INT2 = Tier("int2", keys=PerChannel(2), values=PerToken(2), store=DeviceMemory())


@attrs.frozen
class Blind(AttentionBackend):
    """Attends, and cannot say where the probability went."""

    name: ClassVar[str] = "blind"
    provides: ClassVar[frozenset[Need]] = frozenset({Need.KEYS})

    def attend(self, query: Query, view: View, *, want_mass: bool) -> Attended:
        raise NotImplementedError

    def mass(self, query: Query, view: View) -> Mass:
        raise NotImplementedError


@attrs.frozen
class Far(Store):
    """A store that attention cannot read in place."""

    name: ClassVar[str] = "far"
    attended: ClassVar[bool] = False

    def open(self, layout: Layout, heads: int, device: torch.device) -> Pool:
        raise NotImplementedError


def compose(**changes: Any) -> Policy:
    parts: dict[str, Any] = {
        "scorer": CumulativeAttention(),
        "router": GreedyTiers(shares=(0.3, 0.7)),
        "tiers": (FULL, INT2),
        "ledger": MigrationStable(),
        "backend": ReferenceAttention(),
        "budget": Fraction(0.2),
    }
    return Policy(**(parts | changes))


WORDS: tuple[type, ...] = (
    Policy,
    Tier,
    Fraction,
    Tokens,
    CumulativeAttention,
    GreedyTiers,
    PerChannel,
    PerToken,
    MigrationStable,
    ReferenceAttention,
    DeviceMemory,
)

# ── Values ────────────────────────────────────────────────────────────────────────────────────────

CHANGES: dict[str, Any] = {
    "scorer": CumulativeAttention(prompt_queries=32),
    "router": GreedyTiers(shares=(0.5, 0.5)),
    "tiers": (FULL, attrs.evolve(INT2, keys=PerChannel(4))),
    "backend": ReferenceAttention(),
    "budget": Tokens(512),
    "window_tokens": 16,
    "period_tokens": 4,
    "sink_tokens": 4,
    "recent_tokens": 64,
    "granularity": "kv_head",
    "dtype": torch.bfloat16,
    "accounting": "paper",
    "min_tokens": 100,
    "strict": True,
}


def test_equal_compositions_compare_and_hash_equal() -> None:
    assert compose() == compose()
    assert hash(compose()) == hash(compose())
    assert compose(tiers=[FULL, INT2]) == compose()
    assert compose(budget="20 %") == compose(budget=Fraction(0.2))
    assert len({compose(), compose(), compose(budget=None)}) == 2


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "backend"])
def test_every_part_and_option_counts_in_comparison(name: str) -> None:
    changed = compose(**{name: CHANGES[name]})
    assert changed != compose()
    assert hash(changed) != hash(compose())
    assert changed == compose(**{name: CHANGES[name]})


def test_a_policy_is_frozen_and_copies_are_itself() -> None:
    policy = compose()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        policy.budget = None  # type: ignore[misc]
    assert copy.deepcopy(policy) is policy
    assert copy.copy(policy) == policy


def test_it_prints_its_parts() -> None:
    text = repr(compose())
    for part in ("CumulativeAttention", "GreedyTiers", "PerChannel", "PerToken", "MigrationStable", "0.2", "'int2'"):
        assert part in text


@pytest.mark.parametrize("name", [None, *CHANGES])
def test_what_it_prints_makes_it_again_and_leaves_defaults_out(name: str | None) -> None:
    policy = compose() if name is None else compose(**{name: CHANGES[name]})
    words = {each.__name__: each for each in WORDS}
    assert eval(repr(policy), words | {"torch": torch}) == policy  # noqa: S307 - our own text
    assert "min_tokens" not in repr(compose())


def test_defaults_are_those_of_the_paper() -> None:
    policy = compose()
    assert (policy.window_tokens, policy.period_tokens, policy.sink_tokens, policy.recent_tokens) == (8, 8, 5, 32)
    assert (policy.granularity, policy.accounting, policy.dtype) == ("row", "exact", None)
    assert compose(budget=None).budget is None
    assert compose(recent_tokens=0).protected_tokens == 1
    assert policy.protected_tokens == 32


def test_with_tier_returns_a_new_policy() -> None:
    policy = compose()
    finer = policy.with_tier("int2", keys=PerChannel(4), values=PerToken(4))
    assert policy == compose()
    assert finer == compose(tiers=(FULL, Tier("int2", PerChannel(4), PerToken(4), store=DeviceMemory())))
    assert policy.with_tier("int2") == policy


def test_with_tier_names_the_tiers_on_a_miss_and_still_validates() -> None:
    with pytest.raises(PolicyError, match="no tier is named 'int4'; tiers: full, int2"):
        compose().with_tier("int4", keys=PerChannel(4))
    with pytest.raises(PolicyError, match="only one of keys and values; give both or neither"):
        compose().with_tier("int2", keys=None)
    with pytest.raises(
        PolicyError, match=r"no field 'bits'; fields: name, keys, values, store; .*PerChannel\(bits=4\)"
    ):
        compose().with_tier("int2", bits=4)


def test_the_codec_of_a_tier() -> None:
    assert FULL.codec is None
    assert INT2.codec == (PerChannel(2), PerToken(2))


@pytest.mark.parametrize("name", ["protected", "evicted"])
def test_names_that_reports_use_are_not_for_tiers(name: str) -> None:
    with pytest.raises(PolicyError, match=f"no tier can be named '{name}'"):
        Tier(name, store=DeviceMemory())


@pytest.mark.parametrize("name", ["window_tokens", "period_tokens", "sink_tokens", "recent_tokens", "min_tokens"])
def test_numbers_beyond_any_row_are_refused(name: str) -> None:
    with pytest.raises(PolicyError, match=f"{name} must be below 2\\^31"):
        compose(**{name: 2**31})


@pytest.mark.parametrize("strict", ["no", 1, None])
@pytest.mark.usefixtures("unchecked")
def test_strict_is_true_or_false(strict: Any) -> None:
    with pytest.raises(PolicyError, match="strict must be True or False"):
        compose(strict=strict)


# ── Refusals ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("field", "contract", "name"),
    [
        ("scorer", "Scorer", "cumulative"),
        ("router", "TierRouter", "greedy"),
        ("ledger", "Ledger", "migration_stable"),
        ("backend", "AttentionBackend", "reference"),
    ],
)
def test_a_name_is_refused_where_an_object_is_meant(field: str, contract: str, name: str) -> None:
    with pytest.raises(
        PolicyError,
        match=f"{field} must be a {contract}, got '{name}'; names are for files.*Python code passes objects",
    ):
        compose(**{field: name})


@pytest.mark.parametrize(
    ("field", "part"),
    [("scorer", Recency), ("router", GreedyTiers), ("ledger", MigrationStable), ("backend", ReferenceAttention)],
)
def test_a_class_is_refused_where_an_instance_is_meant(field: str, part: type) -> None:
    with pytest.raises(PolicyError, match=rf"{field} must be .*pass an instance: {part.__name__}\(\)"):
        compose(**{field: part})


@pytest.mark.parametrize("field", ["scorer", "router", "ledger", "backend"])
@pytest.mark.parametrize("wrong", [None, 3, DeviceMemory()], ids=repr)
def test_a_part_of_another_kind_is_refused(field: str, wrong: object) -> None:
    if (field, wrong) == ("backend", None):  # left to be chosen
        return
    with pytest.raises(PolicyError, match=f"{field} must be a"):
        compose(**{field: wrong})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": "per_channel"}, "keys must be a Quantizer, got 'per_channel'; names are for files"),
        ({"values": PerToken}, r"values must be a Quantizer.*pass an instance: PerToken\(\)"),
        ({"keys": DeviceMemory()}, "keys must be a Quantizer"),
        ({"store": "device"}, "store must be a Store, got 'device'; names are for files"),
        ({"store": DeviceMemory}, r"store must be a Store.*pass an instance: DeviceMemory\(\)"),
        ({"store": None}, "store must be a Store"),
        ({"keys": None}, "'t' quantizes only one of keys and values; give both or neither"),
        ({"values": None}, "'t' quantizes only one of keys and values; give both or neither"),
        ({"name": ""}, "a tier needs a name, got ''"),
        ({"name": 3}, "a tier needs a name, got 3"),
    ],
)
def test_impossible_tiers_are_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"name": "t", "keys": PerChannel(), "values": PerToken(), "store": DeviceMemory()}
    Tier(**fields)
    with pytest.raises(PolicyError, match=message):
        Tier(**(fields | changes))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ((), "one Tier or more, hot to cold"),
        ("full", "one Tier or more, hot to cold"),
        ((FULL, "int2"), "one Tier or more, hot to cold"),
        (None, "one Tier or more, hot to cold"),
        (FULL, "one Tier or more, hot to cold"),
        ((FULL, attrs.evolve(INT2, name="full")), "tier names must differ"),
        ((FULL, Tier("warm", store=DeviceMemory())), "only the first tier may keep full precision"),
        ((INT2, FULL), "only the first tier may keep full precision"),
        ((FULL, attrs.evolve(INT2, store=Far())), "tier 'int2' lives in store 'far', which attention cannot read"),
    ],
)
def test_impossible_lists_of_tiers_are_refused(tiers: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        compose(tiers=tiers)


@pytest.mark.parametrize(("tiers", "count"), [((FULL,), 1), ((FULL, INT2, attrs.evolve(INT2, name="int2b")), 3)])
def test_shares_that_do_not_match_the_tiers_are_refused(tiers: tuple[Tier, ...], count: int) -> None:
    with pytest.raises(PolicyError, match=f"2 shares .* for {count} tiers; give one share per tier, hot to cold"):
        compose(tiers=tiers)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("0 %", "must be positive"),
        ("150 %", "at most 1.*budget=None"),
        ("1.5", "no unit.*at most 1.*None for no limit"),
        ("-20 %", "cannot read budget '-20 %'; allowed"),
        ("a lot", "cannot read budget 'a lot'; allowed"),
        ("3 parsecs", "unknown budget unit 'parsecs'.*allowed"),
        (20, "Fraction, Bytes, Tokens or text, got 20; allowed"),
        (0.2, "Fraction, Bytes, Tokens or text, got 0.2; allowed"),
        (0, "Fraction, Bytes, Tokens or text, got 0; allowed"),
        (True, "Fraction, Bytes, Tokens or text, got True; allowed"),
    ],
)
def test_what_is_no_budget_is_refused(budget: Any, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        compose(budget=budget)


def test_absolute_budgets_are_taken() -> None:
    assert compose(budget="64 MiB").budget == Bytes(64 * 2**20)
    assert compose(budget="512 tokens").budget == Tokens(512)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("field", "least"),
    [("window_tokens", 1), ("period_tokens", 1), ("sink_tokens", 0), ("recent_tokens", 0), ("min_tokens", 0)],
)
@pytest.mark.parametrize("value", [-1, 1.5, True, "8", None, 8.0])
def test_impossible_numbers_of_tokens_are_refused(field: str, least: int, value: Any) -> None:
    with pytest.raises(PolicyError, match=f"{field} must be a whole number of at least {least}, got {value!r}"):
        compose(**{field: value})


@pytest.mark.parametrize("field", ["window_tokens", "period_tokens"])
def test_windows_and_periods_of_nothing_are_refused(field: str) -> None:
    with pytest.raises(PolicyError, match=f"{field} must be a whole number of at least 1, got 0"):
        compose(**{field: 0})


def test_one_token_windows_are_refused_where_keys_are_encoded_by_channel() -> None:
    with pytest.raises(PolicyError, match=r"per_channel needs windows of at least 2 tokens.*use per_token or longer"):
        compose(window_tokens=1)
    by_token = Tier("int2", keys=PerToken(2), values=PerToken(2), store=DeviceMemory())
    assert compose(window_tokens=1, tiers=(FULL, by_token)).window_tokens == 1
    assert compose(window_tokens=1, tiers=(FULL,), router=GreedyTiers()).window_tokens == 1


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("granularity", "head", "'row', 'kv_head'"),
        ("granularity", None, "'row', 'kv_head'"),
        ("accounting", "approximate", "'exact', 'paper'"),
        ("route_at", "event", "'period', 'prompt'"),
        ("positions", "relative", "'original', 'cache_relative'"),
        ("dtype", "bfloat16", r"None, torch\.float32, torch\.bfloat16, torch\.float16"),
        ("dtype", torch.float64, r"None, torch\.float32, torch\.bfloat16, torch\.float16"),
        ("dtype", torch.int8, r"None, torch\.float32, torch\.bfloat16, torch\.float16"),
    ],
)
def test_unknown_options_are_refused_with_the_allowed_ones(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(PolicyError, match=f"{field}={value!r} is not allowed; allowed: {allowed}"):
        compose(**{field: value})


@pytest.mark.parametrize("keep_newest", [None, 1, "no"])
def test_keep_newest_is_true_or_false(keep_newest: Any) -> None:
    with pytest.raises(PolicyError, match=f"keep_newest must be True or False, got {keep_newest!r}"):
        compose(keep_newest=keep_newest)


def test_what_is_recent_cannot_compete() -> None:
    with pytest.raises(PolicyError, match=r"keep_newest=False.*recent_tokens=3 protects it; give recent_tokens=0"):
        compose(keep_newest=False, recent_tokens=3)
    assert compose(keep_newest=False, recent_tokens=0).protected_tokens == 0
    assert compose(recent_tokens=0).protected_tokens == 1


def test_places_in_the_cache_serve_a_suffix_in_full_precision_only() -> None:
    one: dict[str, Any] = {"tiers": (FULL,), "router": GreedyTiers(), "positions": "cache_relative"}
    with pytest.raises(PolicyError, match=r"keep a suffix, such as Recency; scorer 'cumulative' does not"):
        compose(**one)
    for tiers, router in (((FULL, INT2), GreedyTiers((0.3, 0.7))), ((INT2,), GreedyTiers())):
        with pytest.raises(PolicyError, match="cache_relative' serves one tier in full precision; drop the other"):
            compose(scorer=Recency(), tiers=tiers, router=router, positions="cache_relative")
    assert compose(scorer=Recency(), **one).positions == "cache_relative"


@pytest.mark.parametrize("observed", [9, 0, -1, 2.0, True])
def test_a_look_beyond_the_period_is_refused_with_the_remedy(observed: Any) -> None:
    """Of whatever scorer: not all of them look at what they are given."""

    @attrs.frozen
    class Looks(CumulativeAttention):
        observe_tokens: Any = None

    assert compose(scorer=Looks(observe_tokens=8), period_tokens=8).scorer.observe_tokens == 8
    found = (
        rf"scorer 'cumulative' has observe_tokens={observed}, .*period_tokens=8; give a whole number from 1 to 8, or"
    )
    with pytest.raises(PolicyError, match=found):
        compose(scorer=Looks(observe_tokens=observed), period_tokens=8)


@pytest.mark.parametrize("queries", [0, -1, 2.5, "x", True])
def test_the_queries_of_a_prompt_are_counted(queries: Any) -> None:
    @attrs.frozen
    class Looks(CumulativeAttention):
        prompt_queries: Any = None

    with pytest.raises(PolicyError, match=rf"'cumulative' has prompt_queries={queries!r}; give at least 1, or None"):
        compose(scorer=Looks(prompt_queries=queries))


@pytest.mark.parametrize("stride", [0, 1.5, None])
def test_an_impossible_stride_is_refused_with_the_remedy(stride: Any) -> None:
    @attrs.frozen
    class Strides(CumulativeAttention):
        prompt_stride: Any = 1

    with pytest.raises(PolicyError, match=rf"prompt_stride={stride}; give a whole number of at least 1"):
        compose(scorer=Strides(prompt_stride=stride))


def test_a_backend_that_lacks_what_the_scorer_needs_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        PolicyError, match="scorer 'cumulative' needs mass, which backend 'blind' does not provide"
    ) as caught:
        compose(backend=Blind())
    assert re.search(r"\b(use|choose|pick|give|take)\b", str(caught.value)), "the message must name a remedy"
    assert compose(backend=Blind(), scorer=Recency()).backend == Blind()


def test_refusals_can_be_caught_as_value_errors() -> None:
    for error in (PolicyError, BudgetError):
        assert issubclass(error, QevictError)
        assert issubclass(error, ValueError)


def test_a_policy_takes_keywords_only() -> None:
    with pytest.raises(TypeError):
        Policy(CumulativeAttention(), GreedyTiers())  # type: ignore[call-arg]


def test_bits_per_tier_are_free() -> None:
    assert qevict("20 %").with_tier("int2", keys=PerChannel(3), values=PerToken(8)).tiers[1].codec == (
        PerChannel(3),
        PerToken(8),
    )
