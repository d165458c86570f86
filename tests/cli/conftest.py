"""Running the command line inside this process."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.chat import save_chat_model
from typer.testing import CliRunner, Result

from qevict.cli import app
from qevict.registry import Registry, Switches

Invoke = Callable[..., Result]


@pytest.fixture(autouse=True)
def only_built_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed where the tests run."""
    ours = Registry(entry_points=(), switches=Switches())
    monkeypatch.setattr("qevict.registry.default_registry", lambda: ours)


@pytest.fixture
def invoke() -> Invoke:
    """Call the command line with arguments, and text on standard input."""

    def call(*argv: str, stdin: str = "") -> Result:
        return CliRunner().invoke(app, argv, input=stdin)

    return call


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny chat model."""
    folder: Path = tmp_path_factory.mktemp("chat")
    return save_chat_model(folder)
