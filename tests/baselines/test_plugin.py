"""The distribution offers what it has, as any plugin does, and nothing of it fails."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from qevict.registry import Registry, Switches

PROJECT = Path(__file__).parents[2] / "baselines" / "pyproject.toml"


@pytest.fixture(scope="module")
def registry() -> Registry:
    """With the plugin that its project names, whether or not it is installed."""
    [(name, value)] = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["entry-points"]["qevict"].items()
    return Registry([EntryPoint(name, value, "qevict")], Switches())


def test_everything_that_is_offered_is_taken(registry: Registry) -> None:
    assert registry.inventory().failures == ()
