"""The one command line, on a model that answers at once: all measurements run, and leave their records."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.oracle import tiny

from qevict_fused import native

ROOT = Path(__file__).parents[2]
SMALL = "--tokens 64 --lengths 32,64 --rounds 1 --rows 2 --ragged-rows 2 --beyond-l3 0 --prompt 16 --new 16 --no-peaks"


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *argv]
    # A worker of a parallel test run says so in its environment, and nobody takes times in one.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = own | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_measurement_runs_and_says_what_it_was_taken_on(tmp_path: Path) -> None:
    """Without the peaks of memory, which start a process for every contestant."""
    tiny("llama", num_hidden_layers=2).save_pretrained(tmp_path / "tiny")
    where = ["--model", str(tmp_path / "tiny"), "--results", str(tmp_path / "results")]
    done = run("benchmarks", *where, *SMALL.split(), "--write", "-k", "not bfloat16")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in (tmp_path / "results").iterdir()}
    kinds = {name.partition("-")[0] for name in found}
    operator = {"operator"} if native.missing() is None else set()
    assert kinds == {"attention", "decode", "generation", "lengths", "prefill", "ragged", "stages"} | operator
    for each in found.values():
        assert {"command", "rounds", "model", "machine", "versions", "what", "weight_bytes"} <= each.keys()
        assert "1 thread" in each["machine"]


def test_a_test_run_takes_no_times() -> None:
    """Its run-time type checks would falsify them."""
    done = run("-c", "pyproject.toml", "benchmarks")
    assert done.returncode != 0
    assert "run `pytest benchmarks`" in done.stdout + done.stderr
