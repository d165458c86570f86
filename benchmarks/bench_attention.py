"""Attention alone: appending, attending, masses, scoring, routing and packing, without the model's weights."""

from typing import Any

from benchmarks.attending import attender, copies_beyond, l3_bytes
from benchmarks.conftest import Note, Play, Wish
from benchmarks.contestants import STOCK, arena, filled, holding, name_of
from benchmarks.record import row, table
from benchmarks.synthetic import context
from qevict.bench.speed import paces

L3_GUESS_BYTES = 32 * 2**20
"""Where the system does not say."""


def bench_attention(model: Any, wish: Wish, play: Play, note: Note) -> None:
    """Copies of each cache take turns, so many that together they exceed the L3 cache; time counts per copy."""
    field = wish.field(model.dtype)
    with arena(model, field) as switch:
        caches = filled(model, field, context(model, [wish.tokens]), switch)
        held = {name: holding(cache, field[name], model) for name, cache in caches.items()}
        limit = wish.beyond_l3 * (l3_bytes() or L3_GUESS_BYTES)
        copies = {name: copies_beyond(each.exact_bytes, limit) for name, each in held.items()}
        runners = {name: attender(model, cache, wish.tokens, copies[name]) for name, cache in caches.items()}
        played = play(runners, switch)
        found = paces([{name: seconds / copies[name] for name, seconds in each.items()} for each in played], STOCK)
    rows = {name: row(found[name], held[name]) for name in field}
    facts = {
        "what": f"8 tokens through the attention of {model.config.num_hidden_layers} layers, no weights",
        "baseline": STOCK,
        "cycled_bytes": {name: copies[name] * each.exact_bytes for name, each in held.items()},
        "rows": rows,
    }
    note(f"attention-{wish.tokens}-{name_of(model.dtype)}", model, facts, [table(rows, STOCK)])
