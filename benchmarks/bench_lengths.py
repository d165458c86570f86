"""Time per token as a line over the length of the context, and where a policy's line crosses the stock cache's."""

import statistics
from collections.abc import Sequence
from typing import Any

import attrs
from rich import box
from rich.table import Table
from transformers import DynamicCache

from benchmarks.conftest import Note, Play, Wish
from benchmarks.contestants import PACKED, STOCK, Contestant, arena, filled, name_of
from benchmarks.decoding import decoder
from benchmarks.lines import Line, break_even, fit
from benchmarks.synthetic import context
from qevict.bench.speed import Round

WEIGHTS = "weights alone"
"""The unit: a step that attends to next to nothing, which streams the weights."""


def bench_lengths(model: Any, wish: Wish, play: Play, note: Note) -> None:
    """Positions may exceed what the model was trained for: its words are of no use then, its time is."""
    field = {name: each for name, each in wish.field(model.dtype).items() if not name.startswith("full")}
    unit = {WEIGHTS: Contestant("sdpa", lambda model: DynamicCache(config=model.config), "sdpa")}
    runners, places = {}, {}
    with arena(model, field | unit) as switch:
        for length in wish.lengths:
            caches = filled(model, field, context(model, [length]), switch) | filled(
                model, unit, context(model, [1]), switch
            )
            for name, cache in caches.items():
                own = 1 if name == WEIGHTS else length
                runners[_at(name, length)] = decoder(model, cache, [own])
                places[_at(name, length)] = name
        played = play(runners, lambda runner: switch(places[runner]))
    lines = {name: fit(wish.lengths, _times(played, name, wish.lengths)) for name in field}
    facts = {
        "what": "time per token = start + slope * length, least squares on medians of paired ratios",
        "unit": f"a step of {WEIGHTS}, in the same round",
        "lengths": wish.lengths,
        "rows": {name: _row(lines, name, _times(played, name, wish.lengths)) for name in field},
    }
    note(f"lengths-{name_of(model.dtype)}", model, facts, [_table(facts["rows"])])


def _at(name: str, length: int) -> str:
    return f"{name} at {length}"


def _times(played: Sequence[Round], name: str, lengths: Sequence[int]) -> list[float]:
    """Median paired time at each length, in units of the weights alone."""
    return [
        statistics.median(each[_at(name, length)] / each[_at(WEIGHTS, length)] for each in played) for length in lengths
    ]


def _row(lines: dict[str, Line], name: str, times: list[float]) -> dict[str, Any]:
    own = lines[name]
    against = {f"faster_than_{rival}_beyond_tokens": break_even(own, lines[rival]) for rival in (STOCK, PACKED)}
    return attrs.asdict(own) | {"times": times} | against


def _table(rows: Any) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column("contestant", no_wrap=True)
    for heading in ("start", "slope per 1000 tokens", "largest miss", f"beyond, {STOCK}", f"beyond, {PACKED}"):
        shown.add_column(heading, justify="right")
    for name, each in rows.items():
        crossings = [each[f"faster_than_{rival}_beyond_tokens"] for rival in (STOCK, PACKED)]
        shown.add_row(
            name,
            f"{each['start']:.3f}",
            f"{1000 * each['slope']:.4f}",
            f"{100 * each['residual']:.0f} %",
            *("never" if tokens is None else f"{tokens:.0f}" for tokens in crossings),
        )
    return shown
