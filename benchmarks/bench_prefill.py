"""What compressing a prompt costs beside reading it: time of the mass pass, and its peak memory."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs

from benchmarks.conftest import Note, Play, Wish
from benchmarks.contestants import STOCK, arena, by_policy, name_of, stock_field
from benchmarks.generating import read, tokens_of
from benchmarks.memory import NOT_TAKEN
from benchmarks.scoring import NONE, scorings
from benchmarks.synthetic import context, fill
from qevict.bench.speed import Round, paces


def bench_prefill(model32: Any, folder: str, wish: Wish, play: Play, note: Note) -> None:
    """The model reads a prompt once a round; the same number of synthetic tokens is stored, scored and packed."""
    model = model32
    field = {STOCK: stock_field()[STOCK]} | {name: by_policy(plan) for name, plan in scorings(wish.budget).items()}
    with arena(model, field) as switch:
        ids, recording = tokens_of(model, 1, wish.tokens), context(model, [wish.tokens])
        runners: dict[str, Callable[[], object]] = {STOCK: lambda: read(model, field[STOCK].make(model), ids)}
        runners |= {name: partial(_take, model, field[name], recording) for name in field if name != STOCK}
        played = play(runners, switch)
    found = paces(played, STOCK)
    peaks = {name: _peak(name, model, folder, wish) for name in field if name != STOCK}
    rows = {
        name: {
            "time": attrs.asdict(found[name]),
            "masses_alone": _masses(played, name),
            "peak_mib": peaks[name],
            "peak_mib_of_masses": _beyond(peaks[name], peaks[NONE]),
        }
        for name in peaks
    }
    facts = {
        "what": f"what a policy does when a prompt of {wish.tokens} tokens has been read, relative to reading it",
        "baseline": f"prefill with {STOCK} and sdpa",
        "masses_alone": f"median over rounds of (own time - that of {NONE}) / prefill",
        "peak": "VmHWM of a fresh process, less what is resident before; the compressed cache included"
        if wish.peaks
        else NOT_TAKEN,
        "rows": rows,
    }
    note(f"prefill-{wish.tokens}-{name_of(model.dtype)}", model, facts)


def _take(model: Any, contestant: Any, recording: Any) -> None:
    fill(contestant.make(model), recording)


def _masses(played: Sequence[Round], name: str) -> float:
    return statistics.median((each[name] - each[NONE]) / each[STOCK] for each in played)


def _beyond(own: float | None, least: float | None) -> float | None:
    return None if own is None or least is None else own - least


def _peak(name: str, model: Any, folder: str, wish: Wish) -> float | None:
    found = wish.peak("score", name, model, folder, rows=1, tokens=wish.tokens, new=0)
    return None if found is None else found / 2**20
