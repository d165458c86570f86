"""The zoo's tables in the docs are those of its record."""

import re
from pathlib import Path

import pytest

import qevict
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


PARTS = {
    "nothing": "diverse QEvict",
    "QEvict's codes": "benchmarks/zoo/plain-codes.toml",
    "32 recent tokens": "benchmarks/zoo/recent-in-full.toml",
    "QEvict's router": "benchmarks/zoo/greedy.toml",
    "QEvict's scorer": "benchmarks/zoo/attention.toml",
    "everything": "QEvict",
}


@pytest.mark.parametrize("put_back", PARTS)
def test_losses_of_the_parts_are_those_of_their_record(put_back: str) -> None:
    """Retrieval, then perplexity, each at 20 and at 10 %."""
    told = markdown(scenes(load_record(RECORD.with_name("zoo-parts.json")).rows))
    sections = [told.split(f"### {task}, 900 tokens")[1].split("###")[0] for task in ("retrieval", "perplexity")]
    found = [
        re.search(rf"^\| {re.escape(PARTS[put_back])}, {budget} \| [^|]+\| [^|]+\| (\S+) \(", section, re.MULTILINE)
        for section in sections
        for budget in ("20 %", "10 %")
    ]
    (row,) = re.findall(rf"^\| {put_back}.*$", (ROOT / "docs" / "zoo.md").read_text("utf-8"), re.MULTILINE)
    assert re.findall(r"[+-]\d\.\d\d", row) == [each[1] for each in found if each]


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "zoo").glob("*.toml")), ids=lambda file: str(file.name))
def test_policies_of_the_parts_load(file: Path) -> None:
    assert qevict.load(file).budget is not None
