"""The command line starts quickly and prints what machines and people can read."""

import json
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

import qevict.errors
from qevict.cli import app
from qevict.registry import default_registry

SOURCE = Path(qevict.errors.__file__).parents[1]


def test_json_lists_the_parts() -> None:
    done = CliRunner().invoke(app, ["plugins", "--json"])

    assert done.exit_code == 0
    listing = json.loads(done.stdout)
    recency = {"name": "recency", "kind": "scorer", "distribution": "qevict", "entry_point": ""}
    assert any(recency.items() <= part.items() for part in listing["parts"])
    preset = {"name": "full", "kind": "preset", "distribution": "qevict", "class": "qevict.policies.full"}
    assert any(preset.items() <= part.items() for part in listing["parts"])
    assert listing["failures"] == listing["disabled"] == []


def test_the_table_has_name_kind_distribution_and_version() -> None:
    done = CliRunner().invoke(app, ["plugins"])

    assert done.exit_code == 0
    for word in ("name", "kind", "distribution", "version", "recency", "scorer", "qevict"):
        assert word in done.stdout


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])

    assert done.exit_code == 0
    assert done.stdout.startswith("qevict ")


def test_without_a_command_there_is_help() -> None:
    assert "plugins" in CliRunner().invoke(app, []).output


def test_an_unknown_command_is_an_error() -> None:
    assert CliRunner().invoke(app, ["plugin"]).exit_code == 2


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys, qevict
before = set(sys.modules)
from qevict.cli import app
app(["--help"], standalone_mode=False)
assert not {"torch", "qevict.registry"} & (set(sys.modules) - before), "imported by the command line"
assert not {"transformers", "pluggy"} & set(sys.modules), "imported"
"""
    environment = {"PYTHONPATH": str(SOURCE), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "plugins" in done.stdout


def test_the_default_registry_is_what_the_command_line_asks() -> None:
    assert default_registry().get("router", "greedy").name == "greedy"
