"""What the environment says about plugins is done."""

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from qevict.errors import PluginError, UnknownPartError
from qevict.registry import PluginWarning, Registry, Switches

Write = Callable[..., None]
Code = Callable[[str], str]
EntryPoints = Callable[[], tuple[EntryPoint, ...]]


@pytest.mark.parametrize("disable", ["1", "true", "qevict_mine", "other, QEvict.Mine", "mine"])
def test_the_environment_disables_plugins(
    site: Path, write: Write, scorer_code: Code, entry_points: EntryPoints, disable: str
) -> None:
    write(site, "qevict-mine", scorer_code("a_name"))
    ours = Registry(entry_points(), Switches.from_environment({"QEVICT_DISABLE_PLUGINS": disable}))

    with pytest.raises(UnknownPartError, match=r"qevict-mine 1.0 .* is disabled by QEVICT_DISABLE_PLUGINS"):
        ours.get("scorer", "a_name")
    assert "qevict_mine" not in sys.modules


@pytest.mark.parametrize("disable", ["", "0", "no", "qevict-other"])
def test_the_environment_disables_nothing_else(
    site: Path, write: Write, scorer_code: Code, entry_points: EntryPoints, disable: str
) -> None:
    write(site, "qevict-mine", scorer_code("a_name"))
    switches = Switches.from_environment({"QEVICT_DISABLE_PLUGINS": disable})

    assert Registry(entry_points(), switches).get("scorer", "a_name").__module__ == "qevict_mine"


def test_tracing_tells_each_load_and_shows_tracebacks(
    site: Path, write: Write, scorer_code: Code, entry_points: EntryPoints, capsys: pytest.CaptureFixture[str]
) -> None:
    write(site, "qevict-broken", "1 / 0")
    write(site, "qevict-mine", scorer_code("mine"))

    switches = Switches.from_environment({"QEVICT_TRACE_PLUGINS": "1"})

    with pytest.warns(PluginWarning):
        Registry(entry_points(), switches).inventory()

    told = capsys.readouterr()
    assert not told.out
    assert "loading qevict-mine 1.0 (entry point 'mine')" in told.err
    assert "qevict_broken.py" in told.err


@pytest.mark.parametrize("code", ["1 / 0", "raise SystemExit(3)"])
def test_the_debug_switch_raises_at_once(site: Path, write: Write, entry_points: EntryPoints, code: str) -> None:
    write(site, "qevict-broken", code)
    ours = Registry(entry_points(), Switches.from_environment({"QEVICT_TRACE_PLUGINS": "raise"}))

    with pytest.raises(PluginError, match=r"^plugin qevict-broken 1.0 ") as caught:
        ours.inventory()

    assert isinstance(caught.value.__cause__, ZeroDivisionError | SystemExit)
