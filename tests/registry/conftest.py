"""Distributions that nobody installed: a ``.dist-info`` folder and a module are all that Python asks for."""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

SCORER = """
from qevict.contracts.scorer import Scorer
from qevict.registry import hookimpl

class Part(Scorer):
    name = "{name}"
    def start(self, lanes, windows, device): return {{}}
    def update(self, state, observation): return state
    def rank(self, state, windows): return {{}}

@hookimpl
def qevict_scorers(): return [Part]
"""


def write_distribution(
    site: Path, name: str, code: str | None, *, value: str | None = None, entry_point: str | None = None
) -> None:
    module = name.replace("-", "_")
    info = site / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    entry = f"{entry_point or name.removeprefix('qevict-')} = {value or module}"
    (info / "entry_points.txt").write_text(f"[qevict]\n{entry}\n", "utf-8")
    if code is not None:
        (site / f"{module}.py").write_text(code, "utf-8")


@pytest.fixture(scope="session")
def write() -> Callable[..., None]:
    """Write a distribution: ``write(site, name, code, value=..., entry_point=...)``."""
    return write_distribution


@pytest.fixture(scope="session")
def scorer_code() -> Callable[[str], str]:
    """The code of a working plugin with one scorer of that name."""
    return lambda name: SCORER.format(name=name)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path of this process, forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def entry_points(site: Path) -> Callable[[], tuple[EntryPoint, ...]]:
    """The entry points of what was written to the site."""

    def found() -> tuple[EntryPoint, ...]:
        distributions = importlib.metadata.distributions(path=[str(site)])
        return tuple(entry for each in distributions for entry in each.entry_points)

    return found
