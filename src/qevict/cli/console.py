"""Consoles and progress bars."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Tick = Callable[[str | None], None]
"""Called with what is done next; with None for one step done."""


def console(*, stderr: bool = False) -> "Console":
    """A console that wraps nothing where nobody looks: into a pipe there are no columns to fit."""
    from rich.console import Console

    shown = Console(stderr=stderr)
    return shown if shown.is_terminal else Console(stderr=stderr, width=10_000, soft_wrap=True)


@contextmanager
def progress(total: int) -> Iterator[Tick]:
    """A bar on stderr, so that stdout holds results alone; into a file, a line for each thing done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("starting", total=total)

        def tick(description: str | None) -> None:
            if description is None:
                bar.advance(task)
                return
            bar.update(task, description=description)
            if not screen.is_terminal:
                screen.print(description, highlight=False, markup=False)

        yield tick
