"""``qevict bench`` and ``qevict demo``."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from qevict.cli.console import console, progress
from qevict.cli.policies import DEFAULT_BUDGET, JsonOption, ModelOption, read_policy
from qevict.cli.writing import writable
from qevict.cli.zoo import zoo
from qevict.errors import PolicyError

app = typer.Typer(help="Measure policies side by side.", no_args_is_help=True)


app.command()(zoo)


@app.callback()
def options() -> None:
    """Measure policies side by side."""


@app.command()
def needle(
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="A preset or a TOML file to measure beside the built-in field; may be repeated."),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", help="Budgets of the field; may be repeated.", show_default="20 %, 10 %"),
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", min=2, max=48, help="How many of the shipped prompts.")] = 48,
    model: ModelOption = "smollm2",
    write: Annotated[
        Path | None, typer.Option("--write", callback=writable, help="Record the figures in this JSON file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Facts hidden in prose: what does an answer cost after the context was compressed?

    Each context is read once and compressed by every policy before the question is seen. Figures are nats per answer
    token; differences carry a paired bootstrap 95 % interval over the prompts.
    """
    guests = {text: read_policy(text) for text in policy or ()}
    from qevict.bench.figures import as_record, claims, figures, legend, table
    from qevict.bench.models import load, quiet_libraries
    from qevict.bench.needle import BUDGETS, contestants, guest, measure
    from qevict.bench.needles import load_needles
    from qevict.bench.provenance import provenance

    field = contestants(budget or BUDGETS)
    if taken := set(field).intersection(guests):
        raise PolicyError(f"{', '.join(sorted(taken))} is in the field already; leave that --policy out")
    field |= {name: guest(own, field) for name, own in guests.items()}
    needles = load_needles()[:prompts]
    quiet_libraries()
    with progress(len(needles) * len(field)) as tick:
        loaded, tokenizer = load(model, progress=tick)
        tick("reading and answering")
        plans = {name: own.policy for name, own in field.items()}
        rows = figures(field, measure(loaded, tokenizer, plans, needles, lambda: tick(None)))
    record = as_record(rows, command=shlex.join(["qevict", *sys.argv[1:]]), prompts=len(needles), **provenance(loaded))
    text = json.dumps(record, indent=1) + "\n"
    if as_json:
        typer.echo(text, nl=False)
    else:
        screen = console()
        screen.print(table(rows))
        screen.print(legend(len(needles)), style="dim", highlight=False)
        for claim in claims(rows):
            screen.print(claim, highlight=False)
    if write is not None:
        write.write_text(text, encoding="utf-8")


def demo(
    *,
    model: ModelOption = "smollm2",
    budget: Annotated[str, typer.Option("--budget", help="Bytes of each compressed cache.")] = DEFAULT_BUDGET,
) -> None:
    """Compress a document before any question is seen, then ask two questions about it."""
    from qevict.bench.demo import STEPS, run, show
    from qevict.bench.models import quiet_libraries

    quiet_libraries()
    with progress(STEPS) as tick:
        outcome = run(model, budget, tick)
    show(console(), outcome)
