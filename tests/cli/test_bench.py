"""`qevict bench needle` on a tiny model: the whole way, from prompts to a recorded file."""

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Invoke

from qevict.errors import PolicyError

OWN = """
schema = 1
preset = "evict_only"
budget = "30 %"
prompt_queries = 16
dtype = "bfloat16"
"""


def test_figures_are_printed_and_recorded(invoke: Invoke, chat_model: str, tmp_path: Path) -> None:
    own, record = tmp_path / "own.toml", tmp_path / "needle.json"
    own.write_text(OWN, encoding="utf-8")
    argv = ("--model", chat_model, "--prompts", "2", "--budget", "30 %", "--policy", str(own), "--write", str(record))
    done = invoke("bench", "needle", *argv)
    assert done.exit_code == 0, done.exception
    assert "QEvict, paper accounting, 30 %" in done.stdout
    written = json.loads(record.read_text(encoding="utf-8"))
    assert written["prompts"] == 2
    assert written["model"].endswith("computed in float32")
    figures = written["figures"]
    assert len(figures) == 1 + 7 + 1
    assert figures[str(own)]["against"] == "QEvict, 30 %"
    assert all(len(figure["nats_by_prompt"]) == 2 for figure in figures.values())
    for name, figure in figures.items():
        assert (figure["exact_share"] <= 0.3) == (name != "full" and "paper" not in name)


def test_wrong_arguments_are_refused_before_the_model_loads(invoke: Invoke, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("schema = 1\npreset = 'qevct'\n", encoding="utf-8")
    for argv in (("--policy", str(bad)), ("--budget", "5 cups")):
        done = invoke("bench", "needle", *argv, "--model", "no such model")
        assert isinstance(done.exception, PolicyError)
    assert invoke("bench", "needle", "--prompts", "1").exit_code == 2


def test_a_record_that_cannot_be_written_is_refused_first(invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("bench", "needle", "--write", str(tmp_path / "no" / "where.json"), "--model", "no such model")
    assert done.exit_code == 2
    assert "--write" in done.stderr


def test_a_guest_does_not_take_the_place_of_the_field(invoke: Invoke) -> None:
    assert isinstance(invoke("bench", "needle", "--policy", "full", "--model", "no such model").exception, PolicyError)


@pytest.mark.parametrize("budget", ["no %", "-3 %", ""])
def test_budgets_are_checked(invoke: Invoke, budget: str) -> None:
    assert isinstance(invoke("bench", "needle", "--budget", budget).exception, PolicyError)
