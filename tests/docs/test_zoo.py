"""The zoo's tables in the docs are those of its record."""

from pathlib import Path

import pytest

from qevict.bench.zoo.compare import scenes
from qevict.bench.zoo.record import load_record
from qevict.bench.zoo.tables import markdown

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "zoo.json"
PAGE = ROOT / "docs" / "zoo-tables.md"


@pytest.mark.skipif(
    not RECORD.exists(), reason="nothing is recorded: qevict bench zoo --write benchmarks/results/zoo.json"
)
def test_tables_are_those_of_the_record() -> None:
    """Written by ``qevict bench zoo --from benchmarks/results/zoo.json`` somewhere in the page."""
    assert markdown(scenes(load_record(RECORD).rows)) in PAGE.read_text("utf-8")
