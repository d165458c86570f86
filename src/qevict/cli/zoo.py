"""``qevict bench zoo``."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from qevict.cli.console import console
from qevict.cli.policies import JsonOption, ModelOption, read_policy
from qevict.cli.writing import writable
from qevict.errors import InputError, PolicyError

if TYPE_CHECKING:
    from qevict.bench.zoo.record import Record
    from qevict.bench.zoo.run import Wish


def zoo(
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="A preset or a TOML file to measure wherever the target is; may be repeated."),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="One of the tasks; may be repeated.", show_default="all")
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="End within this time.")] = 90,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes of one thread, with a model each.")] = 2,
    model: ModelOption = "smollm2",
    write: Annotated[
        Path | None,
        typer.Option(
            "--write",
            callback=writable,
            help="Record the figures in this JSON file; a line for each prompt "
            "goes to the same name with .jsonl, as it comes.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--continue", help="Go on with what a stopped run has left beside --write.")
    ] = False,
    source: Annotated[
        Path | None, typer.Option("--from", help="Show a record instead of measuring.", exists=True, dir_okay=False)
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option("--plots", file_okay=False, exists=True, help="Draw each scene as SVG in this folder."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Many tasks, many policies, equal exact bytes: what does each lose?

    Each prompt is read once and compressed by every policy, before the question is seen and with it. Rounds over all
    tasks go on until the time is up, what matters most first; the record says what was left out.
    """
    from qevict.bench.zoo.record import load_record

    if source is not None:
        show(load_record(source), plots, as_json=as_json)
        return
    if resume and write is None:
        raise InputError("--continue goes on with the file beside --write; name it by --write")
    wish = _wish(model, policy or (), task or (), minutes, workers, write, resume=resume)
    found = _measure(wish)
    if write is not None:
        found.write(write)
    show(found, plots, as_json=as_json)


def _wish(
    model: str,
    policies: "list[str] | tuple[()]",
    tasks: "list[str] | tuple[()]",
    minutes: float,
    workers: int,
    write: Path | None,
    *,
    resume: bool,
) -> "Wish":
    guests = {text: read_policy(text) for text in policies}
    from qevict.bench.zoo.field import guest, known_entrants
    from qevict.bench.zoo.interim import Interim
    from qevict.bench.zoo.run import Wish
    from qevict.bench.zoo.tasks import TASKS

    known, missing = known_entrants()
    if taken := {entrant.name for entrant in known}.intersection(guests):
        raise PolicyError(f"{', '.join(sorted(taken))} is in the field already; leave that --policy out")
    if unknown := set(tasks).difference(TASKS):
        raise InputError(f"no task is called {', '.join(sorted(unknown))}; the tasks are {', '.join(TASKS)}")
    entrants = (*known, *(guest(name, own) for name, own in guests.items()))
    interim = None if write is None else Interim(write.with_suffix(".jsonl"))
    chosen = tuple(name for name in TASKS if not tasks or name in tasks)
    return Wish(model, entrants, missing, chosen, minutes, workers, interim, resume)


def _measure(wish: "Wish") -> "Record":
    from qevict.bench.models import quiet_libraries
    from qevict.bench.zoo.run import run

    quiet_libraries()
    screen = console(stderr=True)
    with screen.status("loading") as status:

        def tick(done: str) -> None:
            status.update(done)
            if not screen.is_terminal:
                screen.print(done, highlight=False, markup=False)

        found = run(wish, tick)
    return attrs.evolve(found, facts={"command": shlex.join(["qevict", *sys.argv[1:]]), **found.facts})


def show(record: "Record", plots: Path | None, *, as_json: bool) -> None:
    """Print tables and claims, or the record itself; draw."""
    from qevict.bench.zoo.compare import scenes
    from qevict.bench.zoo.plot import draw, file_name
    from qevict.bench.zoo.tables import markdown

    found = tuple(scenes(record.rows))
    for scene in found if plots is not None else ():
        assert plots is not None
        draw(scene, plots / file_name(scene))
    typer.echo(record.text() if as_json else markdown(found), nl=False)
