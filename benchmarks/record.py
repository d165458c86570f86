"""What a measurement leaves behind: a file for the repository, a table for a person."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from rich import box
from rich.table import Table

from benchmarks.contestants import Holding
from qevict.bench.speed import Pace

RESULTS = Path(__file__).parent / "results"


def row(pace: Pace, held: Holding) -> dict[str, Any]:
    """One contestant of a comparison, ready to be written."""
    return {"time": attrs.asdict(pace)} | attrs.asdict(held)


def write(name: str, found: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Record a measurement."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(rounded(found), indent=1) + "\n", encoding="utf-8")
    return path


def rounded(value: Any) -> Any:
    """Plain data with numbers of four digits that count."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def table(rows: Mapping[str, Mapping[str, Any]], baseline: str) -> Table:
    """Paces and holdings for a terminal."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column("contestant", no_wrap=True)
    for heading in (f"time / {baseline}'s", "quartiles", "least", "p95", "attended", "bytes", "backend"):
        shown.add_column(heading, justify="right")
    for name, each in rows.items():
        pace, attended = each["time"], each["tokens_attended"]
        shown.add_row(
            name,
            f"{pace['ratio']:.2f}",
            f"{pace['low']:.2f} to {pace['high']:.2f}",
            f"{pace['least']:.2f}",
            f"{pace['p95']:.2f}",
            f"{sum(attended) / len(attended):.0f}",
            f"{100 * each['exact_bytes'] / each['full_bytes']:.1f} %",
            each["backend"],
        )
    return shown
