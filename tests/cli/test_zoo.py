"""`qevict bench zoo` on a tiny model: the whole way, from prompts to a recorded file and back."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs
import pytest
from tests.cli.conftest import Invoke

from qevict.bench.zoo import run
from qevict.bench.zoo.field import CANDIDATE, PLAIN, Level
from qevict.bench.zoo.prompts import SEEN, UNSEEN, Prompt
from qevict.bench.zoo.record import load_record
from qevict.bench.zoo.tasks import TASKS
from qevict.errors import InputError, PolicyError

LEVELS = (
    Level((CANDIDATE,), "900", UNSEEN, ("20 %",), 2),
    Level((PLAIN,), "900", UNSEEN, ("20 %",), 1),
    Level((CANDIDATE,), "900", SEEN, ("20 %",), 1),
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few levels and short texts."""

    def shorter(task: Callable[[str, int], Iterator[Prompt]], length: str, count: int) -> Iterator[Prompt]:
        for prompt in task(length, count):
            yield attrs.evolve(prompt, text=prompt.text[:700])

    monkeypatch.setattr(run, "LEVELS", LEVELS)
    monkeypatch.setattr(run, "TASKS", {name: partial(shorter, task) for name, task in TASKS.items()})


def test_figures_are_recorded_shown_and_continued(invoke: Invoke, chat_model: str, tmp_path: Path) -> None:
    own, path = tmp_path / "own.toml", tmp_path / "zoo.json"
    own.write_text("schema = 1\npreset = 'evict_only'\nbudget = '30 %'\nwindow_tokens = 4\n", encoding="utf-8")
    argv = ("bench", "zoo", "--model", chat_model, "--workers", "1", "--task", "needle", "--write", str(path))
    first = invoke(*argv, "--policy", str(own))
    assert first.exit_code == 0, first.exception
    record = load_record(path)
    assert {row.mode for row in record.rows} == {UNSEEN, SEEN}
    assert {(row.name, row.budget, len(row.nats)) for row in record.rows if row.mode == UNSEEN} == {
        ("full", None, 2),
        ("QEvict", "20 %", 2),
        (str(own), "20 %", 2),
        ("evict-only", "20 %", 1),
        ("sinks + recent", "20 %", 1),
    }
    assert "SnapKV" in record.facts["missing"]
    assert record.facts["left_out"] == record.facts["refused"] == {}
    assert record.facts["command"].startswith("qevict")
    assert "### needle, 900 tokens, before the question is seen" in first.stdout

    lines = path.with_suffix(".jsonl").read_text("utf-8").splitlines(keepends=True)
    path.with_suffix(".jsonl").write_text("".join(lines[:2]), "utf-8")
    again = invoke(*argv, "--policy", str(own), "--continue")
    assert again.exit_code == 0, again.exception
    rows = load_record(path).rows
    assert [row.places for row in rows] == [row.places for row in record.rows]
    assert path.with_suffix(".jsonl").read_text("utf-8").startswith("".join(lines[:2])), "measured again"

    plots = tmp_path / "plots"
    plots.mkdir()
    shown = invoke("bench", "zoo", "--from", str(path), "--plots", str(plots))
    assert shown.stdout == again.stdout
    assert [each.name for each in plots.iterdir()] != []
    plain = invoke("bench", "zoo", "--from", str(path), "--json")
    assert json.loads(plain.stdout)["rows"]


def test_no_time_is_a_record_of_what_was_left_out(invoke: Invoke, chat_model: str, tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    done = invoke("bench", "zoo", "--model", chat_model, "--workers", "1", "--minutes", "0.1", "--write", str(path))
    assert done.exit_code == 0, done.exception
    record = load_record(path)
    assert record.facts["left_out"]["900/unseen/QEvict/20 %"].endswith(", 2 of look-alike")
    assert record.rows == ()


def test_wrong_arguments_are_refused_before_the_model_loads(invoke: Invoke) -> None:
    for argv, kind in (
        (("--task", "noodle"), InputError),
        (("--policy", "full", "--policy", "sinks_recent"), None),
        (("--continue",), InputError),
    ):
        done = invoke("bench", "zoo", "--model", "no such model", *argv)
        assert done.exit_code != 0
        assert isinstance(done.exception, kind or PolicyError)
