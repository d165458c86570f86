"""One backend's call alone, over the same tiers: neither the model nor the engine takes part."""

import copy
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import torch
from rich import box
from rich.table import Table

from benchmarks.attending import attender
from benchmarks.conftest import Note, Play, Wish
from benchmarks.contestants import arena, by_policy, cheap_to_fill, filled, name_of
from benchmarks.naive import NaiveRebuild
from benchmarks.synthetic import context
from qevict import policies
from qevict.backends.flash import FlashAttention
from qevict.bench.speed import Pace, paces
from qevict.contracts.backend import Attended, AttentionBackend, Query, View
from qevict.contracts.values import Need
from qevict.shapes import Mass
from qevict_fused import FusedAttention

OPERATOR, BLIND, THREADED = "operator", "operator, no masses", "operator, {} threads"

_TIMES = 4
"""Calls over every layer in one round, so that a round lasts long enough to be timed."""


@attrs.frozen(eq=False)
class Watching(AttentionBackend):
    """Remembers what the flash backend was asked last: copies, since what is lent moves with the next event."""

    name: ClassVar[str] = "watching"
    provides: ClassVar[frozenset[Need]] = FlashAttention.provides
    seen: deque[tuple[Query, View]]

    def attend(self, query: Query, view: View, *, want_mass: bool) -> Attended:
        """Noted, and passed on."""
        self.seen.append(copy.deepcopy((query, view)))
        return FlashAttention().attend(query, view, want_mass=want_mass)

    def mass(self, query: Query, view: View) -> Mass:
        """Passed on."""
        return FlashAttention().mass(query, view)


def bench_operator(model: Any, wish: Wish, play: Play, note: Note) -> None:
    """One token of every layer: the operator, with and without masses and threads, and what else reads these tiers."""
    asked = _views(model, wish)
    threads = min(2, os.cpu_count() or 1)
    contestants: dict[str, tuple[AttentionBackend, bool]] = {
        OPERATOR: (FusedAttention(), True),
        BLIND: (FusedAttention(), False),
        THREADED.format(threads): (FusedAttention(), True),
        "flash backend": (FlashAttention(), True),
        "naive rebuild": (NaiveRebuild(), True),
    }
    runners = {name: _calls(asked, *each) for name, each in contestants.items()}

    def switch(name: str) -> None:
        torch.set_num_threads(threads if "threads" in name else wish.threads)

    with torch.no_grad():
        played = play(runners, switch)
    torch.set_num_threads(wish.threads)
    found = paces(played, OPERATOR)
    rows = {name: {"time": attrs.asdict(pace)} for name, pace in found.items()}
    facts = {
        "what": f"one token of every layer, QEvict {wish.budget} behind {wish.tokens} synthetic tokens",
        "baseline": OPERATOR,
        "rows": rows,
    }
    note(f"operator-{wish.tokens}-{name_of(model.dtype)}", model, facts, [_table(found)])


def _views(model: Any, wish: Wish) -> Sequence[tuple[Query, View]]:
    """What the engine asks a backend, layer by layer."""
    watching = Watching(deque(maxlen=model.config.num_hidden_layers))
    policy = attrs.evolve(cheap_to_fill(policies.qevict(wish.budget, dtype=model.dtype)), backend=watching)
    field = {OPERATOR: by_policy(policy)}
    with arena(model, field) as switch:
        cache = filled(model, field, context(model, [wish.tokens]), switch)[OPERATOR]
        attender(model, cache, wish.tokens, copies=1)()
    return [*watching.seen]


def _calls(asked: Sequence[tuple[Query, View]], backend: AttentionBackend, want_mass: bool) -> Callable[[], None]:  # noqa: FBT001 - the flag of the contract
    def run() -> None:
        for _ in range(_TIMES):
            for query, view in asked:
                backend.attend(query, view, want_mass=want_mass)

    return run


def _table(found: dict[str, Pace]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column("backend", no_wrap=True)
    shown.add_column(f"time / {OPERATOR}'s", justify="right")
    shown.add_column("quartiles", justify="right")
    for name, pace in found.items():
        shown.add_row(name, f"{pace.ratio:.2f}", f"{pace.low:.2f} to {pace.high:.2f}")
    return shown
