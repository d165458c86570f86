"""The command line: ``qevict``.

Commands import what they need when they run, so that ``--help`` does not wait for torch.
"""

import sys
import warnings
from typing import Annotated

import typer

from qevict.cli import bench, generate, plugins, show
from qevict.errors import QevictError
from qevict.version import own_version

app = typer.Typer(
    name="qevict",
    help="Compose, run and measure KV-cache compression policies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(show.show)
app.command()(generate.generate)
app.command()(bench.demo)
app.command()(plugins.plugins)
app.add_typer(bench.app, name="bench")


def _print_version(*, wanted: bool) -> bool:
    if wanted:
        typer.echo(f"qevict {own_version()}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compose, run and measure KV-cache compression policies.

    Exit codes: 0 done, 1 refused or failed (the reason is printed), 2 wrong usage.
    """


def _in_a_line(message: Warning | str, *_where: object) -> None:
    typer.echo(f"warning: {message}", err=True)


def main() -> None:
    """Run the command line; what qevict refuses is a message, not a traceback."""
    warnings.showwarning = _in_a_line  # type: ignore[assignment]  # where a warning was raised is left out
    try:
        app(prog_name="qevict")
    except QevictError as error:
        typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
        typer.echo(str(error), err=True)
        sys.exit(1)
