"""Attention alone: appending, attending, masses, scoring, routing and packing, without the model's weights."""

from typing import Any

from benchmarks.attending import attender, copies_beyond, l3_bytes
from benchmarks.conftest import Note, Play, Wish
from benchmarks.contestants import STOCK, arena, filled, holding, name_of, policy_field, stock_field
from benchmarks.record import row, table
from benchmarks.synthetic import context
from qevict.bench.speed import paces

L3_GUESS_BYTES = 32 * 2**20
"""Where the system does not say."""


def bench_attention(model: Any, wish: Wish, play: Play, note: Note) -> None:
    """So many copies of each cache take turns that those of the smallest contestant exceed the L3 cache."""
    field = stock_field() | policy_field(wish.budget, model.dtype)
    with arena(model, field) as switch:
        caches = filled(model, field, context(model, [wish.tokens]), switch)
        held = {name: holding(cache, field[name], model) for name, cache in caches.items()}
        least = min(each.exact_bytes for each in held.values())
        copies = copies_beyond(least, wish.beyond_l3 * (l3_bytes() or L3_GUESS_BYTES))
        runners = {name: attender(model, cache, wish.tokens, copies) for name, cache in caches.items()}
        found = paces(play(runners, switch), STOCK)
    rows = {name: row(found[name], held[name]) for name in field}
    facts = {
        "what": f"attention of {model.config.num_hidden_layers} layers x {copies} caches, 8 tokens each, no weights",
        "baseline": STOCK,
        "cycled_bytes": {name: copies * each.exact_bytes for name, each in held.items()},
        "rows": rows,
    }
    note(f"attention-{wish.tokens}-{name_of(model.dtype)}", model, facts, [table(rows, STOCK)])
