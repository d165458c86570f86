"""A batch whose rows differ in length: time against the tokens that are attended to."""

from typing import Any

import torch

from benchmarks.conftest import Note, Play, Wish
from benchmarks.contestants import (
    STOCK,
    Contestant,
    Holding,
    arena,
    by_policy,
    cheap_to_fill,
    filled,
    holding,
    name_of,
    plans,
    stock_field,
)
from benchmarks.decoding import decoder
from benchmarks.record import row, table
from benchmarks.synthetic import context
from qevict.bench.speed import Pace, paces


def shapes(rows: int, tokens: int) -> dict[str, list[int]]:
    """Rows of ``tokens / rows`` to ``tokens`` tokens; as many of the mean length; as many of the longest."""
    ragged = [round(each) for each in torch.linspace(tokens / rows, tokens, rows).tolist()]
    return {"longest": [tokens] * rows, "mean": [round(sum(ragged) / rows)] * rows, "ragged": ragged}


def bench_ragged(model: Any, wish: Wish, play: Play, note: Note) -> None:
    """A stock cache pays for the pads of short rows; a policy should pay for what it holds."""
    ours = f"QEvict {wish.budget}, stored {name_of(model.dtype)}"
    kinds = stock_field() | {ours: by_policy(cheap_to_fill(plans(wish.budget, model.dtype)[ours]))}
    runners, caches, field = {}, {}, {}
    with arena(model, kinds) as switch:
        for shape, lengths in shapes(wish.ragged_rows, wish.tokens).items():
            for kind, cache in filled(model, kinds, context(model, lengths), switch).items():
                name = f"{kind}, {shape}"
                caches[name], field[name] = cache, kinds[kind]
                runners[name] = decoder(model, cache, lengths)
        played = play(runners, lambda name: switch(name.rpartition(", ")[0]))
    baseline = f"{STOCK}, longest"
    found, held = paces(played, baseline), _held(caches, field, model)
    rows = {name: row(found[name], held[name]) | _per_token(found, held, name, baseline) for name in runners}
    facts = {"what": f"{wish.ragged_rows} rows, left padded where they differ", "baseline": baseline, "rows": rows}
    facts["shapes"] = shapes(wish.ragged_rows, wish.tokens)
    note(f"ragged-{wish.tokens}-{name_of(model.dtype)}", model, facts, [table(rows, baseline)])


def _held(caches: dict[str, Any], field: dict[str, Contestant], model: Any) -> dict[str, Holding]:
    """Tokens attended count the pads of stock caches, which they do attend to and mask."""
    return {name: holding(cache, field[name], model) for name, cache in caches.items()}


def _per_token(found: dict[str, Pace], held: dict[str, Holding], name: str, baseline: str) -> dict[str, float]:
    """Time per token attended, relative to the baseline's."""
    share = sum(held[name].tokens_attended) / sum(held[baseline].tokens_attended)
    return {"time_per_attended_token": found[name].ratio / share}
