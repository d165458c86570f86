"""The command line: ``qevict``.

Commands import what they need when they run, so that ``--help`` does not wait for torch.
"""

import importlib.metadata
import json
import warnings
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

if TYPE_CHECKING:
    from rich.console import Console

    from qevict.registry import Failure, Inventory, Offer

app = typer.Typer(
    name="qevict",
    help="Compose, run and measure KV-cache compression policies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(*, wanted: bool) -> bool:
    if wanted:
        try:
            typer.echo(f"qevict {importlib.metadata.version('qevict')}")
        except importlib.metadata.PackageNotFoundError:
            typer.echo("qevict (not installed)")
        raise typer.Exit
    return wanted


@app.callback()
def main(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compose, run and measure KV-cache compression policies."""


@app.command()
def plugins(*, as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False) -> None:
    """List all parts, whose they are, and which plugins failed and why."""
    inventory = _inventory()
    if as_json:
        typer.echo(json.dumps(_as_json(inventory), indent=2))
    else:
        _print_tables(inventory)


def _inventory() -> "Inventory":
    from qevict.registry import PluginWarning, default_registry

    with warnings.catch_warnings():
        # The failures are what this command prints; warning of each would say it twice.
        warnings.simplefilter("ignore", PluginWarning)
        return default_registry().inventory()


def _as_json(inventory: "Inventory") -> dict[str, list[dict[str, str | None]]]:
    return {
        "parts": [_part(offer) for offer in inventory.parts],
        "failures": [_failure(failure) for failure in inventory.failures],
        "disabled": [attrs.asdict(source) for source in inventory.disabled],
    }


def _part(offer: "Offer") -> dict[str, str | None]:
    where = {"class": f"{offer.part.__module__}.{offer.part.__qualname__}"}
    return {"name": offer.name, "kind": offer.kind, **attrs.asdict(offer.source), **where}


def _failure(failure: "Failure") -> dict[str, str | None]:
    return {**attrs.asdict(failure.source), "kind": failure.kind, "name": failure.name, "cause": failure.cause}


def _print_tables(inventory: "Inventory") -> None:
    from rich.markup import escape
    from rich.table import Table

    console = _console()
    table = Table("name", "kind", "distribution", "version")
    for offer in inventory.parts:
        row = (offer.name, offer.kind, offer.source.distribution, offer.source.version)
        table.add_row(*map(escape, row))  # a plugin may well contain [brackets]
    console.print(table)
    for failure in inventory.failures:
        console.print(f"[red]failed[/red] {escape(str(failure))}", highlight=False)
    for source in inventory.disabled:
        console.print(f"[yellow]disabled[/yellow] plugin {escape(source.plugin)}", highlight=False)


def _console() -> "Console":
    from rich.console import Console

    console = Console()
    # Into a pipe nothing is wrapped: there are no columns to fit, and lines are for grep.
    return console if console.is_terminal else Console(width=10_000, soft_wrap=True)


if __name__ == "__main__":
    app(prog_name="qevict")
