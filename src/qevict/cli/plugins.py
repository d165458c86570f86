"""``qevict plugins``."""

import json
import warnings
from typing import TYPE_CHECKING

import attrs
import typer

from qevict.cli.console import console
from qevict.cli.policies import JsonOption

if TYPE_CHECKING:
    from qevict.registry import Failure, Inventory, Offer


def plugins(*, as_json: JsonOption = False) -> None:
    """List all parts and presets, whose they are, and which plugins failed and why."""
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
    from qevict.registry.kinds import path_of

    where = {"class": path_of(offer.part)}
    return {"name": offer.name, "kind": offer.kind, **attrs.asdict(offer.source), **where}


def _failure(failure: "Failure") -> dict[str, str | None]:
    return {**attrs.asdict(failure.source), "kind": failure.kind, "name": failure.name, "cause": failure.cause}


def _print_tables(inventory: "Inventory") -> None:
    from rich.markup import escape
    from rich.table import Table

    screen = console()
    table = Table("name", "kind", "distribution", "version")
    for offer in inventory.parts:
        row = (offer.name, offer.kind, offer.source.distribution, offer.source.version)
        table.add_row(*map(escape, row))  # a plugin may well contain [brackets]
    screen.print(table)
    for failure in inventory.failures:
        screen.print(f"[red]failed[/red] {escape(str(failure))}", highlight=False)
    for source in inventory.disabled:
        screen.print(f"[yellow]disabled[/yellow] plugin {escape(source.plugin)}", highlight=False)
