"""A plugin that misbehaves while it is loaded is on record, and nothing else suffers."""

import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from qevict.registry import PluginWarning, Registry, Switches
from qevict.scorers.recency import Recency

Write = Callable[..., None]
Code = Callable[[str], str]
EntryPoints = Callable[[], tuple[EntryPoint, ...]]


def registry(entry_points: EntryPoints) -> Registry:
    return Registry(entry_points(), Switches())


def first_failure(of: Registry) -> str:
    with pytest.warns(PluginWarning):
        return str(of.inventory().failures[0])


def test_a_broken_plugin_costs_one_warning(site: Path, write: Write, entry_points: EntryPoints) -> None:
    write(site, "qevict-broken", "1 / 0")
    ours = registry(entry_points)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ours.inventory()
        ours.inventory()

    [warning] = seen
    assert warning.category is PluginWarning
    assert "plugin qevict-broken 1.0 (entry point 'broken') failed: ZeroDivisionError" in str(warning.message)


def test_ctrl_c_is_not_swallowed(site: Path, write: Write, entry_points: EntryPoints) -> None:
    write(site, "qevict-slow", "raise KeyboardInterrupt")

    with pytest.raises(KeyboardInterrupt):
        registry(entry_points).inventory()


def test_a_plugin_that_asks_the_registry_while_loading_fails_alone(
    site: Path, write: Write, entry_points: EntryPoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(site, "qevict-loop", "import builtins; builtins.ask_registry()")
    ours = registry(entry_points)
    monkeypatch.setattr("builtins.ask_registry", lambda: ours.get("scorer", "loop"), raising=False)

    assert "while it was being loaded" in first_failure(ours)


def test_damaged_metadata_does_not_hide_a_plugin(
    site: Path, write: Write, scorer_code: Code, entry_points: EntryPoints
) -> None:
    write(site, "qevict-mine", scorer_code("mine"))
    (site / "qevict_mine-1.0.dist-info" / "METADATA").unlink()

    assert registry(entry_points).get("scorer", "mine").__module__ == "qevict_mine"


def test_unreadable_entry_points_leave_the_built_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(**_: str) -> None:
        raise ValueError("no equals sign")

    monkeypatch.setattr("importlib.metadata.entry_points", unreadable)
    ours = Registry(switches=Switches())

    assert "no equals sign" in first_failure(ours)
    assert ours.get("scorer", "recency") is Recency
