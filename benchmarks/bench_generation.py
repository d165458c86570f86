"""A batch with a short prompt that generates: first token, further tokens, throughput and peak memory.

The shape is that of the paper's throughput table, 256 tokens read and 1024 generated; rows and tokens are scaled to
the machine by ``--rows`` and ``--new``.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs

from benchmarks.conftest import Note, Play, Wish
from benchmarks.contestants import STOCK, arena, by_policy, holding, name_of, stock_field
from benchmarks.decoding import CYCLE_TOKENS, decoder
from benchmarks.generating import read, tokens_of
from benchmarks.memory import NOT_TAKEN
from benchmarks.record import rounded, row, table
from qevict.bench.speed import Round, pace, paces, take_turns


def bench_generation(model: Any, folder: str, wish: Wish, play: Play, note: Note) -> None:
    """First tokens are taken in turns, each from an empty cache; then all decode side by side, cycle by cycle."""
    field = stock_field() | {name: by_policy(plan) for name, plan in wish.policies(model.dtype).items()}
    ids, caches = tokens_of(model, wish.rows, wish.prompt), {}

    def first(name: str) -> None:
        caches[name] = field[name].make(model)
        read(model, caches[name], ids)

    with arena(model, field) as switch:
        firsts = [take_turns({name: partial(first, name) for name in field}, turn, switch) for turn in range(_FIRSTS)]
        lengths = [wish.prompt] * wish.rows
        runners = {name: decoder(model, cache, lengths) for name, cache in caches.items()}
        cycles = play(runners, switch, rounds=max(1, wish.new // CYCLE_TOKENS - 1))
    found, opening = paces(cycles, STOCK), paces(firsts[1:], STOCK)
    peaks = {name: _peak(name, model, folder, wish) for name in field}
    rows = {}
    for name, each in field.items():
        rows[name] = row(found[name], holding(caches[name], each, model))
        rows[name] |= {"time_to_first_token": attrs.asdict(opening[name])}
        rows[name] |= {"throughput": 1 / _whole(firsts[1:], cycles, name), "peak_mib_beyond_the_model": peaks[name]}
    facts = {
        "what": f"{wish.rows} rows, {wish.prompt} tokens read, {wish.new} generated; time is that per output token",
        "baseline": STOCK,
        "peak": "VmHWM of a fresh process that does the same, less what was resident with the model loaded"
        if wish.peaks
        else NOT_TAKEN,
        "rows": rows,
    }
    note(f"generation-{name_of(model.dtype)}", model, facts, [table(rows, STOCK), _columns(rows)])


_FIRSTS = 3
"""First tokens of each contestant; the first of them warms up."""


def _whole(firsts: Sequence[Round], cycles: Sequence[Round], name: str) -> float:
    """Time from the empty cache to the last token, relative to the stock cache's."""

    def total(one: str) -> float:
        return statistics.median(each[one] for each in firsts) + sum(each[one] for each in cycles)

    return pace([total(name)], [total(STOCK)]).ratio


def _peak(name: str, model: Any, folder: str, wish: Wish) -> float | None:
    found = wish.peak("generate", name, model, folder, rows=wish.rows, tokens=wish.prompt, new=wish.new)
    return None if found is None else found / 2**20


def _columns(rows: dict[str, Any]) -> dict[str, Any]:
    """What the table has no column for."""
    return {
        name: {
            "first token": each["time_to_first_token"]["ratio"],
            "throughput": each["throughput"],
            "peak, MiB": each["peak_mib_beyond_the_model"],
        }
        for name, each in rounded(rows).items()
    }
