"""Peak memory of a process while it decodes, behind a context that is there already."""

from typing import Any

import pytest

from benchmarks.conftest import Note, Wish
from benchmarks.contestants import STOCK, arena, filled, holding, name_of
from benchmarks.decoding import CYCLE_TOKENS
from benchmarks.memory import NOT_TAKEN
from benchmarks.synthetic import context


def bench_memory(model: Any, folder: str, wish: Wish, benchmark: Any, note: Note) -> None:
    """A process for each contestant; how much less each takes than the stock cache, of the bytes that it saves."""
    if not wish.peaks:
        pytest.skip(NOT_TAKEN)
    field = wish.field(model.dtype)
    with arena(model, field) as switch:
        caches = filled(model, field, context(model, [wish.tokens]), switch)
    held = {name: holding(cache, field[name], model).exact_bytes for name, cache in caches.items()}
    peaks: dict[str, Any] = {}

    def measure() -> None:
        for name in field:
            peaks[name] = wish.peak("decode", name, model, folder, rows=1, tokens=wish.tokens, new=2 * CYCLE_TOKENS)

    benchmark.pedantic(measure)
    rows: dict[str, dict[str, Any]] = {}
    for name in field:
        saved = held[STOCK] - held[name]
        rows[name] = {"exact_bytes": held[name], "peak_bytes_beyond_the_model": peaks[name]}
        rows[name] |= {"falls_by": (peaks[STOCK] - peaks[name]) / saved if saved > 0 else None}
    facts = {
        "what": f"{2 * CYCLE_TOKENS} tokens decoded behind a synthetic context of {wish.tokens} tokens",
        "peak": "VmHWM of a fresh process while it decodes, less what was resident with the model loaded",
        "falls_by": "fall of the peak against the stock cache's, as a share of the bytes that the cache saves",
        "baseline": STOCK,
        "rows": rows,
    }
    note(f"memory-{wish.tokens}-{name_of(model.dtype)}", model, facts)
