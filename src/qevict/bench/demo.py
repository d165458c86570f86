"""The demo: a document is compressed before any question is seen; then two questions are asked.

Run it with ``make demo``, or ``python -m qevict.bench.demo``.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import DynamicCache
from transformers.utils import logging

import qevict
from qevict import policies
from qevict.bench.examination import REPLY_TOKENS, Examination, Watcher, context_ids, examine, unwatched
from qevict.bench.models import SMOLLM2, load
from qevict.bench.prompts import Question, load_document, load_questions
from qevict.bench.speed import Pace, compare
from qevict.engine.report import Report
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy

FULL, SINKS, EVICT, QEVICT = "full cache", "sinks + recent", "evict-only", "QEvict"
STOCK = "DynamicCache"
STORED = torch.bfloat16
SPEED_ROUNDS = 3


def contestants(budget: str) -> dict[str, Policy]:
    """The demo's policies; full precision is stored in 16 bits in all of them."""
    return {
        FULL: policies.full(dtype=STORED),
        SINKS: policies.sinks_recent(budget, dtype=STORED),
        EVICT: policies.evict_only(budget, dtype=STORED),
        QEVICT: policies.qevict(budget, dtype=STORED),
    }


def main() -> None:
    """Run the demo from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2, help="a hub id or path of a chat model (default: %(default)s)")
    parser.add_argument("--budget", default="20 %", help="bytes of each compressed cache (default: %(default)s)")
    wish = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = Console()
    plans = contestants(wish.budget)
    questions = load_questions()[:2]
    with _progress(console) as (progress, task):
        progress.update(task, description="loading the model", total=2 * len(plans) + 2)
        model, tokenizer = load(wish.model, progress=lambda text: progress.update(task, description=text))
        found = {}
        for name, policy in plans.items():
            progress.update(task, description=f"asking under {name}", advance=1)
            found[name] = run_policy(model, tokenizer, policy, questions)
        progress.update(task, description="comparing decode speed", advance=1)
        paces = speeds(model, tokenizer, plans, questions, lambda: progress.update(task, advance=0.25))
        progress.update(task, completed=2 * len(plans) + 2, description="done")
    _show(console, found, paces, questions, model.dtype)


def run_policy(
    model: Any, tokenizer: Any, policy: Policy, questions: tuple[Question, ...], watch: Watcher = unwatched
) -> Examination:
    """One row of the table; ``watch`` may look at the cache after every forward."""
    return examine(model, tokenizer, policy, load_document().text, questions, watch)


def speeds(
    model: Any, tokenizer: Any, plans: dict[str, Policy], questions: tuple[Question, ...], tick: Any
) -> dict[str, Pace]:
    """Decode time relative to transformers' DynamicCache, over whole 8-token cycles that take turns."""
    context = context_ids(tokenizer, load_document().text, questions)
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model.base_model(context, use_cache=True, **{CACHE_ARGUMENT: stock})
    caches: dict[str, Any] = {STOCK: stock}
    with qevict.attach(model, plans[FULL]):
        for name, policy in plans.items():
            cache = qevict.Cache(model, policy)
            with torch.no_grad():
                model.base_model(context, use_cache=True, **{CACHE_ARGUMENT: cache})
            caches[name] = cache
        return compare(model, caches, rounds=SPEED_ROUNDS, cycle_tokens=8, tick=tick)


def table(found: dict[str, Examination], paces: dict[str, Pace]) -> Table:
    """One row per policy."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column("cache", no_wrap=True)
    for heading in ("right", "nats", "exact", "paper", "windows", "moves", "decode"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, result in found.items():
        report = result.finished
        shown.add_row(
            name,
            f"{result.right}/{len(result.replies)}",
            f"{result.nats:.2f}",
            _share(report.exact_bytes, report),
            _share(report.paper_bytes, report),
            "\n".join(f"{count} {'new' if tier == 'protected' else tier}" for tier, count in report.windows.items()),
            f"{report.promotions} up\n{report.demotions} down\n{report.evictions} out",
            f"× {paces[name].ratio:.2f}",
        )
    return shown


def verdict(found: dict[str, Examination]) -> str:
    """What the table shows, in one line, read off its own numbers."""
    full, evict, own = found[FULL], found[EVICT], found[QEVICT]
    share = 100 * own.finished.exact_bytes / own.finished.full_bytes
    order = "less than" if own.nats < evict.nats else "no less than"
    return (
        f"In {share:.0f} % of the bytes QEvict loses {own.nats - full.nats:.2f} nats per answer token against the full "
        f"cache, {order} evict-only ({evict.nats - full.nats:.2f}) at the same budget; answers right: "
        f"full {full.right}, sinks + recent {found[SINKS].right}, evict-only {evict.right}, QEvict {own.right} "
        f"of {len(own.replies)}."
    )


def _share(count: int, report: Report) -> str:
    return f"{100 * count / report.full_bytes:.1f} %"


def _show(
    console: Console, found: dict[str, Examination], paces: dict[str, Pace], questions: tuple[Question, ...], dtype: Any
) -> None:
    for index, question in enumerate(questions):
        console.print(f"\n[bold]{question.question}[/bold] (the document says: {question.answer})")
        for name, result in found.items():
            reply = result.replies[index]
            mark = "[green]right[/green]" if reply.right else "[red]wrong[/red]"
            console.print(f"  {name}: {mark}, {reply.nats:.2f} nats: ", end="")
            console.print(" ".join(reply.text.split())[:110], markup=False, highlight=False)
    console.print()
    console.print(table(found, paces))
    for name, result in found.items():
        kinds = (f"{count / 2**20:.2f} MiB {kind}" for kind, count in result.finished.bytes_by_kind.items() if count)
        console.print(f"bytes of {name}: {', '.join(kinds)}")
    console.print(_legend(dtype), style="dim")
    console.print(f"\n[bold]{verdict(found)}[/bold]")


def _legend(dtype: torch.dtype) -> str:
    computed, stored = (str(each).removeprefix("torch.") for each in (dtype, STORED))
    return (
        f"right: replies of {REPLY_TOKENS} tokens that hold the answer. nats: mean negative log-likelihood of the "
        "right answers' tokens, each in the conversation so far. exact: bytes of all storages of the cache, in all "
        "layers; paper: codes x 1.05 and no bookkeeping; both in percent of a full cache in the stored dtype. "
        "windows and moves: summed over layers. decode: time of whole 8-token cycles against transformers' "
        f"DynamicCache, median of {SPEED_ROUNDS} rounds in turn. Computed in {computed}, full precision stored in "
        f"{stored}, {torch.get_num_threads()} CPU threads."
    )


@contextmanager
def _progress(console: Console) -> Iterator[tuple[Progress, TaskID]]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress, progress.add_task("starting")


if __name__ == "__main__":
    main()
