"""How a report looks on a terminal."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from qevict.engine.report import Report

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def in_units(count: int) -> str:
    """A number of bytes for a person: ``"1.5 MiB"``."""
    amount, unit = float(count), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{amount:.4g} {_UNITS[unit]}"


def report_table(report: "Report") -> Group:
    """Bytes by kind, windows and bytes by tier, and how both accountings stand to the budget."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column("where")
    for heading in ("windows", "bytes", "of a full cache"):
        shown.add_column(heading, justify="right", no_wrap=True)

    for group in _groups(report):
        for name, windows, count in group:
            share = f"{100 * count / report.full_bytes:.1f} %" if report.full_bytes else ""
            shown.add_row(name, windows, in_units(count), share)
        shown.add_section()
    return Group(shown, Text(f"\n{_in_words(report)}"))


def _groups(report: "Report") -> tuple[list[tuple[str, str, int]], ...]:
    """Rows of name, windows and bytes: by tier, by kind, in all."""
    tiers = [(name, str(report.windows[name]), count) for name, count in report.bytes_by_tier.items()]
    kinds = [(name, "", count) for name, count in report.bytes_by_kind.items() if count]
    totals = {"exact": report.exact_bytes, "paper": report.paper_bytes, "budget": report.budget_bytes}
    return tiers, kinds, [(name, "", count) for name, count in totals.items() if count is not None]


def _in_words(report: "Report") -> str:
    tokens = ", ".join(map(str, report.tokens)) or "no"
    over = f"; over the budget by {in_units(report.overshoot_bytes)}" if report.overshoot_bytes else ""
    hybrid = report.bytes_by_kind["layers not ruled"] or not report.ruled_layers
    ruled = f"; layers ruled by the policy: {report.ruled_layers}" if hybrid else ""
    return (
        f"{tokens} tokens{ruled}; full precision in {report.dtype}; {report.promotions} promotions, {report.demotions} "
        f"demotions, {report.evictions} evictions{over}; backend {report.backend} ({report.backend_reason})"
    )
