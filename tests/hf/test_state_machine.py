"""Random interleavings of all that may happen to a cache, against a plain model of what it must hold."""

import contextlib
import copy
import pickle
import random
import tempfile
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tests.oracle import tiny
from tests.plain import Plain
from tests.plain_policies import TIERS, policies
from tests.plain_scorers import Shuffled
from tests.twin import Twin, rules_of

import qevict
from qevict.errors import InputError, InterruptedCacheError, UnsupportedOperationError
from qevict.registry import Registry

MODEL = tiny("llama", num_hidden_layers=2)
WHICH = st.integers(0, 2)
LENGTHS = st.integers(1, 90) | st.integers(40, 90)
SEEDS = st.integers(0, 2**16).map(random.Random)
"""Token ids are drawn by the handful, since which they are hardly matters."""


def _reorder(twin: Twin, data: st.DataObject) -> list[int]:
    """As beam search does: as many rows as before, some of them repeated."""
    rows = len(twin.plain.rows)
    order = data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows), label="rows")
    twin.cache.reorder_cache(torch.tensor(order))
    return order


def _select(twin: Twin, data: st.DataObject) -> list[int]:
    """Fewer rows than before, or more."""
    order = data.draw(st.lists(st.integers(0, len(twin.plain.rows) - 1), min_size=1, max_size=3), label="rows")
    twin.cache.batch_select_indices(torch.tensor(order))
    return order


def _repeat(twin: Twin, data: st.DataObject) -> list[int]:
    """Every row so many times, four in all at most."""
    rows = range(len(twin.plain.rows))
    repeats = data.draw(st.integers(1, max(4 // len(rows), 1)), label="repeats")
    twin.cache.batch_repeat_interleave(repeats)
    return [row for row in rows for _ in range(repeats)]


def _refused(twin: Twin, data: st.DataObject) -> list[int]:
    """Rows that are not there: refused, and nothing changes."""
    rows = torch.tensor(data.draw(st.sampled_from([[7], [-1], []]), label="rows"), dtype=torch.long)
    for method in (twin.cache.reorder_cache, twin.cache.batch_select_indices):
        with pytest.raises(InputError):
            method(rows)
    return [*range(len(twin.plain.rows))]


CHOICES: dict[str, Callable[[Twin, st.DataObject], list[int]]] = {
    "reorder": _reorder,
    "select": _select,
    "repeat": _repeat,
    "refused": _refused,
}
"""Ways to choose rows; each says which rows it left."""

COPIES: dict[str, Callable[[Any, Path], Any]] = {
    "fork": lambda cache, _folder: cache.fork(),
    "deepcopy": lambda cache, _folder: copy.deepcopy(cache),
    "pickle": lambda cache, _folder: pickle.loads(pickle.dumps(cache)),  # noqa: S301 - what we have just written
    "file": lambda cache, folder: _saved_and_loaded(cache, folder / "cache.safetensors"),
}
"""Ways to have a cache twice."""


def _saved_and_loaded(cache: Any, path: Path) -> Any:
    cache.save(path, MODEL)
    return qevict.Cache.load(path, MODEL)


class StateMachine(RuleBasedStateMachine):
    """Up to three caches of one policy; each rule takes one of them."""

    tiers = "three tiers"

    def __init__(self) -> None:
        super().__init__()
        self.context = contextlib.ExitStack()
        self.folder = Path(self.context.enter_context(tempfile.TemporaryDirectory()))
        self.twins: list[Twin] = []

    def teardown(self) -> None:
        self.context.close()

    @initialize(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        policy = data.draw(policies(*TIERS[self.tiers]), label="policy")
        session = self.context.enter_context(qevict.attach(MODEL, policy))
        cache = session.cache()
        self.twins.append(Twin(cache, Plain(rules_of(cache))))
        _announce(self.twins[0], data)
        _read(self.twins[0], data)

    def twin(self, which: int) -> Twin:
        return self.twins[which % len(self.twins)]

    @rule(which=WHICH, data=st.data())
    def read(self, which: int, data: st.DataObject) -> None:
        """Many tokens: a prompt's, or a later turn's."""
        twin = self.twin(which)
        if not twin.plain.rows and not twin.coming:
            _announce(twin, data)
        if twin.coming:
            _read(twin, data)
        else:
            _turn(twin, data)

    @rule(which=WHICH, data=st.data())
    def decode(self, which: int, data: st.DataObject) -> None:
        """A few tokens, one by one, after what is left of a prompt; some may be taken back."""
        twin = self.twin(which)
        if twin.coming:
            _read_piece(twin, len(twin.coming[0][0]))
        if twin.plain.rows:
            _steps(twin, data)
            if data.draw(st.booleans(), label="take back"):
                _take_back(twin, data)

    @rule(which=WHICH, how=st.sampled_from([*CHOICES]), data=st.data())
    def choose_rows(self, which: int, how: str, data: st.DataObject) -> None:
        """Rows in another order, left out, or repeated."""
        twin = self.twin(which)
        if twin.plain.rows:
            twin.select(CHOICES[how](twin, data))

    @rule(which=WHICH, how=st.sampled_from([*COPIES]))
    def fork(self, which: int, how: str) -> None:
        """A second cache that starts from the same state, and does just the same."""
        twin = self.twin(which)
        copied = twin.copy(COPIES[how](twin.cache, self.folder))
        twin.check_same_future(copied, MODEL)
        self.twins = [*self.twins[-2:], copied]

    @rule(which=WHICH, now=st.integers(0, 3))
    def start_over(self, which: int, now: int) -> None:
        """A copy is broken off within a forward, refuses everything, and is emptied; seldom, as it ends so much."""
        twin = self.twin(which)
        if now == 0 and twin.plain.rows:
            broken = twin.copy(twin.cache.fork())
            _break_off(broken)
            broken.cache.reset()
            self.twins = [*self.twins[-2:], Twin(broken.cache, Plain(twin.plain.rules))]

    @invariant()
    def all_hold_what_they_must(self) -> None:
        for twin in self.twins:
            twin.check()


def _announce(twin: Twin, data: st.DataObject) -> None:
    """A prompt of several rows, padded on the left; it comes in one piece unless it was announced."""
    lengths, tokens = data.draw(st.lists(LENGTHS, min_size=1, max_size=3), label="prompt"), data.draw(SEEDS)
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
    in_pieces = twin.plain.announced and data.draw(st.booleans(), label="in pieces")
    _read_piece(twin, data.draw(st.integers(1, left), label="piece") if in_pieces else left)


def _read_piece(twin: Twin, width: int) -> None:
    twin.feed(MODEL, [ids[:width] for ids, _ in twin.coming], [valid[:width] for _, valid in twin.coming])
    twin.coming = [(ids[width:], valid[width:]) for ids, valid in twin.coming if ids[width:]]


def _turn(twin: Twin, data: st.DataObject) -> None:
    """Many tokens at once, of which rows may have different numbers."""
    width, tokens, rows = data.draw(st.integers(2, 12), label="width"), data.draw(SEEDS), len(twin.plain.rows)
    pads = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows), label="pads")
    turn = [_padded(own, width - own, tokens) for own in (pads if twin.told else [0] * rows)]
    twin.feed(MODEL, [ids for ids, _ in turn], [valid for _, valid in turn])


def _steps(twin: Twin, data: st.DataObject) -> None:
    tokens, rows = data.draw(SEEDS), len(twin.plain.rows)
    for _ in range(data.draw(st.integers(1, 8), label="tokens")):
        twin.feed(MODEL, [[tokens.randrange(3, 97)] for _ in range(rows)], [[True]] * rows)


def _take_back(twin: Twin, data: st.DataObject) -> None:
    """As if the last tokens had never come, and others instead; or refused, and nothing changes."""
    untouched = max(1, min(row.since for row in twin.plain.rows))
    slots = data.draw(st.integers(1, untouched) | st.integers(1, twin.plain.seen), label="slots")
    if twin.plain.can_crop(slots):
        twin.cache.crop(torch.tensor(-slots) if data.draw(st.booleans(), label="tensor") else -slots)
        twin.plain.crop(slots)
        twin.check()
        _steps(twin, data)
    else:
        with pytest.raises((InputError, UnsupportedOperationError)):
            twin.cache.crop(-slots)


def _break_off(twin: Twin) -> None:
    """A forward that fails between the layers; what is left refuses everything."""

    def fail(*_args: object) -> None:
        raise KeyboardInterrupt

    hook = MODEL.model.layers[1].register_forward_pre_hook(fail)
    rows = len(twin.plain.rows)
    try:
        with pytest.raises(KeyboardInterrupt):
            twin.feed(MODEL, [[5]] * rows, [[True]] * rows)
    finally:
        hook.remove()
    order = torch.arange(rows).flip(0)
    for refused in (lambda: twin.cache.reorder_cache(order), lambda: twin.cache.crop(-1), twin.cache.report):
        with pytest.raises(InterruptedCacheError):
            refused()


def _run(tiers: str, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        type("StateMachine", (StateMachine,), {"tiers": tiers}),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file names the scorers of a policy, so they must be a plugin's."""
    registry = Registry([EntryPoint("plain", "tests.plain_scorers", "qevict")])
    monkeypatch.setattr("qevict.config.files.default_registry", lambda: registry)


@pytest.mark.slow
@pytest.mark.usefixtures("offered", "unchecked")
@pytest.mark.parametrize("tiers", TIERS)
def test_any_interleaving(tiers: str) -> None:
    _run(tiers, 10, 14)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("offered", "unchecked")
@pytest.mark.parametrize("tiers", TIERS)
def test_very_many_interleavings(tiers: str) -> None:
    _run(tiers, 500, 40)


@pytest.mark.parametrize("slots", range(1, 12))
def test_tokens_taken_back_across_events(slots: int) -> None:
    """The same walk every time, since random ones seldom come by: a turn, single tokens, and back into either."""
    sizes: dict[str, Any] = {"window_tokens": 2, "period_tokens": 3, "recent_tokens": 8}
    policy = attrs.evolve(qevict.policies.full(), scorer=Shuffled(), **sizes)
    with qevict.attach(MODEL, policy) as session:
        cache = session.cache()
        twin = Twin(cache, Plain(rules_of(cache)))
        for width in (30, 7, 1, 1, 1, 1):
            twin.feed(MODEL, [[*range(5, 5 + width)]], [[True] * width])
        cache.crop(-slots)
        twin.plain.crop(slots)
        for token in range(8):
            twin.check()
            twin.feed(MODEL, [[50 + token]], [[True]])
