"""Decoding at one length: whole cycles of 8 tokens, with routing and packing, relative to DynamicCache."""

from typing import Any

from benchmarks.conftest import Note, Play, Wish
from benchmarks.contestants import STOCK, arena, filled, holding, name_of
from benchmarks.decoding import CYCLE_TOKENS, decoder
from benchmarks.record import row, table
from benchmarks.synthetic import context
from qevict.bench.speed import paces


def bench_decode(model: Any, wish: Wish, play: Play, note: Note) -> None:
    """Every contestant holds the same context and decodes with the whole model, so that weights evict the L3 cache."""
    field = wish.field(model.dtype)
    with arena(model, field) as switch:
        caches = filled(model, field, context(model, [wish.tokens]), switch)
        played = play({name: decoder(model, cache, [wish.tokens]) for name, cache in caches.items()}, switch)
    found = paces(played, STOCK)
    rows = {name: row(found[name], holding(caches[name], each, model)) for name, each in field.items()}
    facts = {
        "what": f"{CYCLE_TOKENS} tokens decoded by the whole model behind a synthetic context of {wish.tokens} tokens",
        "baseline": STOCK,
        "rows": rows,
    }
    note(f"decode-{wish.tokens}-{name_of(model.dtype)}", model, facts, [table(rows, STOCK)])
