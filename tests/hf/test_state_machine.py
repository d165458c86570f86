"""Random interleavings of all that may happen to a cache, against a plain model of what it must hold."""

import contextlib
import copy
import random
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tests.oracle import tiny
from tests.plain import Plain
from tests.plain_scorers import Shuffled, Turning
from tests.twin import Twin, rules_of

import qevict
from qevict.contracts.budget import Fraction, Tokens
from qevict.ledgers.migration_stable import MigrationStable
from qevict.policy import Policy, Tier
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.routers.greedy import GreedyTiers
from qevict.stores.memory import DeviceMemory

MODEL = tiny("llama", num_hidden_layers=2)
FULL = Tier("full", store=DeviceMemory())


def coded(bits: int) -> Tier:
    return Tier(f"int{bits}", PerChannel(bits), PerToken(bits), store=DeviceMemory())


TIERS = {
    "evict": ((FULL,), (1.0,)),
    "two tiers": ((FULL, coded(4)), (0.5, 0.5)),
    "three tiers": ((FULL, coded(8), coded(4)), (0.4, 0.3, 0.3)),
    "codes only": ((coded(8), coded(2)), (0.6, 0.4)),
}

BUDGETS = st.sampled_from(
    [None, *map(Tokens, (25, 40, 55, 70, 90)), *map(Fraction, (0.3, 0.5, 0.7, 0.9))]
)
POLICIES = st.builds(
    lambda tiers, **options: Policy(
        tiers=TIERS[tiers][0], router=GreedyTiers(TIERS[tiers][1]), ledger=MigrationStable(), **options
    ),
    tiers=st.sampled_from([*TIERS]),
    scorer=st.sampled_from([Turning(), Shuffled()]),
    budget=BUDGETS,
    window_tokens=st.sampled_from([2, 4, 8]),
    period_tokens=st.integers(1, 9),
    sink_tokens=st.sampled_from([0, 3, 4]),
    recent_tokens=st.sampled_from([0, 1, 5, 8]),
    granularity=st.sampled_from(["row", "kv_head"]),
    min_tokens=st.sampled_from([0, 0, 0, 40]),
)
SEEDS = st.integers(0, 2**16).map(random.Random)
"""Token ids are drawn by the handful, since which they are hardly matters."""


class StateMachine(RuleBasedStateMachine):
    """Up to three caches of one policy; each rule takes one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.context = contextlib.ExitStack()
        self.twins: list[Twin] = []

    def teardown(self) -> None:
        import os
        if os.environ.get("STATS"):
            for t in self.twins:
                p=t.plain
                print("STAT", p.promotions,p.demotions,p.evictions,p.seen, len(p.rows), t.cache.policy.granularity)
        self.context.close()

    @initialize(policy=POLICIES, data=st.data())
    def attach(self, policy: Policy, data: st.DataObject) -> None:
        session = self.context.enter_context(qevict.attach(MODEL, policy))
        cache = session.cache()
        self.twins.append(Twin(cache, Plain(rules_of(cache))))
        _announce(self.twins[0], data)
        _read(self.twins[0], data)

    def twin(self, which: int) -> Twin:
        return self.twins[which % len(self.twins)]

    @rule(which=st.integers(0, 2), data=st.data())
    def update(self, which: int, data: st.DataObject) -> None:
        """The next tokens: of a prompt, of a turn, or a few of generation."""
        twin = self.twin(which)
        if not twin.plain.prompted and not twin.coming:
            _announce(twin, data)
        if twin.coming:
            _read(twin, data)
        elif data.draw(st.booleans(), label="turn"):
            _turn(twin, data)
        else:
            _steps(twin, data)

    @rule(which=st.integers(0, 2), deep=st.booleans())
    def fork(self, which: int, deep: bool) -> None:
        """A second cache that starts from the same state; the eldest makes room."""
        twin = self.twin(which)
        copied = copy.deepcopy(twin.cache) if deep else twin.cache.fork()
        self.twins = [*self.twins[-2:], twin.copy(copied)]

    @invariant()
    def all_hold_what_they_must(self) -> None:
        for twin in self.twins:
            twin.check()


def _announce(twin: Twin, data: st.DataObject) -> None:
    """A prompt of several rows, padded on the left; it comes in one piece unless it was announced."""
    lengths, tokens = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=3), label="prompt"), data.draw(SEEDS)
    twin.told = data.draw(st.booleans(), label="position ids")
    twin.coming = [_padded(max(lengths) - own, own, tokens) for own in lengths]
    if data.draw(st.booleans(), label="announced"):
        twin.cache.expect(max(lengths))
        twin.plain.announced = max(lengths)


def _padded(pads: int, length: int, tokens: random.Random) -> tuple[list[int], list[bool]]:
    """Ids of a row, and which of them are tokens."""
    return [0] * pads + tokens.choices(range(3, 97), k=length), [False] * pads + [True] * length


def _read(twin: Twin, data: st.DataObject) -> None:
    """The next piece of the prompt."""
    left = len(twin.coming[0][0])
    width = data.draw(st.integers(1, left), label="piece") if twin.plain.announced else left
    twin.feed(MODEL, [ids[:width] for ids, _ in twin.coming], [valid[:width] for _, valid in twin.coming])
    twin.coming = [(ids[width:], valid[width:]) for ids, valid in twin.coming] if width < left else []


def _turn(twin: Twin, data: st.DataObject) -> None:
    """Many tokens at once, of which rows may have different numbers."""
    width, tokens, rows = data.draw(st.integers(2, 12), label="width"), data.draw(SEEDS), len(twin.plain.rows)
    pads = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows), label="pads")
    turn = [_padded(own, width - own, tokens) for own in (pads if twin.told else [0] * rows)]
    twin.feed(MODEL, [ids for ids, _ in turn], [valid for _, valid in turn])


def _steps(twin: Twin, data: st.DataObject) -> None:
    """A few tokens, one by one."""
    tokens = data.draw(SEEDS)
    for _ in range(data.draw(st.integers(1, 12), label="tokens")):
        twin.feed(MODEL, [[tokens.randrange(3, 97)] for _ in twin.plain.rows], [[True]] * len(twin.plain.rows))


def _run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        StateMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )


@pytest.mark.usefixtures("unchecked")
def test_any_interleaving() -> None:
    _run(40, 12)


@pytest.mark.exhaustive
def test_very_many_interleavings() -> None:
    _run(2000, 40)
