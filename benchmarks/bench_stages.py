"""Where the time of a decode step goes: a profile for every number that is missed."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from rich import box
from rich.table import Table

from benchmarks.conftest import Note, Play, Wish
from benchmarks.contestants import PACKED, STOCK, arena, by_policy, cheap_to_fill, filled, holding, name_of, stock_field
from benchmarks.decoding import decoder
from benchmarks.stages import ATTENTION, WHOLE, operator_shares, shares, stage_seconds
from benchmarks.synthetic import context
from qevict import policies
from qevict.bench.speed import paces
from qevict.scorers.recency import Recency

OURS, BLIND = "QEvict", "QEvict, no masses"


def bench_stages(model: Any, wish: Wish, play: Play, note: Note) -> None:
    """The same cycle with and without masses, by stage of the engine and by operator."""
    ours = cheap_to_fill(policies.qevict(wish.budget))
    field = stock_field() | {OURS: by_policy(ours), BLIND: by_policy(attrs.evolve(ours, scorer=Recency()))}
    with arena(model, field) as switch:
        caches = filled(model, field, context(model, [wish.tokens]), switch)
        runners = {name: decoder(model, cache, [wish.tokens]) for name, cache in caches.items()}
        played = play(runners, switch)
        switch(OURS)
        watched = [{name: stage_seconds(runners[name]) for name in (OURS, BLIND)} for _ in range(wish.rounds)]
        operators = {}
        for name in (STOCK, PACKED, OURS):
            switch(name)
            operators[name] = operator_shares(runners[name])
    stages = _median([shares(each[OURS]) for each in watched])
    facts = {
        "what": f"shares of {OURS} {wish.budget}'s time in whole cycles, behind {wish.tokens} synthetic tokens",
        "backend": caches[OURS].report().backend,
        "time": {name: attrs.asdict(each) for name, each in paces(played, STOCK).items()},
        "tokens_attended": {name: holding(caches[name], field[name], model).tokens_attended for name in (OURS, BLIND)},
        "masses": statistics.median(_masses(each) for each in watched),
        "stages": stages,
        "operators": operators,
    }
    shown = [_table("stage of the engine", {OURS: stages | {"of attention: masses, by difference": facts["masses"]}})]
    shown += [_table("operator", {name: each}) for name, each in operators.items()]
    note(f"stages-{wish.tokens}-{name_of(model.dtype)}", model, facts, shown)


def _masses(watched: Mapping[str, Mapping[str, float]]) -> float:
    """Share of a step that masses take: attention with them, less attention to as many tokens without them."""
    return (watched[OURS][ATTENTION] - watched[BLIND][ATTENTION]) / watched[OURS][WHOLE]


def _median(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in shares) for name in shares[0]}


def _table(heading: str, columns: Mapping[str, Mapping[str, float]]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column(heading, no_wrap=True)
    for name, column in columns.items():
        shown.add_column(f"share of {name}", justify="right")
        for stage, share in column.items():
            shown.add_row(stage, f"{100 * share:.1f} %")
    return shown
