"""Refusals are messages with exit code 1, wrong usage is exit code 2, and results alone go to standard output."""

import subprocess
import sys

import pytest

from qevict.policies import PRESETS


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qevict.cli", *argv], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_refusal_is_a_message_and_no_traceback() -> None:
    done = run("show", "qevct")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: no preset is named 'qevct'\n  did you mean 'qevict'")
    assert "files of policies end in .toml" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("argv", [("show",), ("sho",), ("show", "qevict", "--tokens", "0"), ("bench", "pin")])
def test_wrong_usage(argv: tuple[str, ...]) -> None:
    done = run(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage" in done.stderr


def test_the_help_names_every_preset() -> None:
    """It is written out there, so that help need not wait for torch."""
    text = " ".join(run("show", "--help").stdout.replace("│", " ").split())
    assert f"({', '.join(PRESETS)})" in text


def test_every_command_explains_itself() -> None:
    for argv in ((), ("show",), ("generate",), ("bench",), ("bench", "needle"), ("demo",), ("plugins",)):
        done = run(*argv, "--help")
        assert done.returncode == 0
        assert "Usage" in done.stdout
