"""The demo: a document is compressed before any question is seen; then two questions are asked.

Run it with ``make demo``, or ``qevict demo``.
"""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

import qevict
from qevict import policies
from qevict.bench.examination import REPLY_TOKENS, Examination, Watcher, context_ids, examine, unwatched
from qevict.bench.models import load
from qevict.bench.prompts import Question, load_document, load_questions
from qevict.bench.speed import Pace, compare
from qevict.engine.report import Report
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy

FULL, SINKS, EVICT, QEVICT = "full cache", "sinks + recent", "evict-only", "QEvict"
STOCK = "DynamicCache"
STORED = torch.bfloat16
SPEED_ROUNDS = 3
STEPS = 6
"""Of a run: loading, four policies, speeds."""

Tick = Callable[[str | None], None]
"""Called with what is done next; with None when it is done."""


def contestants(budget: str) -> dict[str, Policy]:
    """The demo's policies; full precision is stored in 16 bits in all of them."""
    return {
        FULL: policies.full(dtype=STORED),
        SINKS: policies.sinks_recent(budget, dtype=STORED),
        EVICT: policies.evict_only(budget, dtype=STORED),
        QEVICT: policies.qevict(budget, dtype=STORED),
    }


@attrs.frozen
class Outcome:
    """What the demo found.

    Attributes:
        found: by policy.
        paces: decode time by policy, relative to transformers' DynamicCache.
        questions: what was asked.
        dtype: in which the model computes.
    """

    found: dict[str, Examination]
    paces: dict[str, Pace]
    questions: tuple[Question, ...]
    dtype: torch.dtype


def run(model_name: str, budget: str, tick: Tick) -> Outcome:
    """Load the model, ask under every policy, compare speeds; ``tick`` hears of every step."""
    plans, questions = contestants(budget), load_questions()[:2]
    tick("loading the model")
    model, tokenizer = load(model_name, progress=tick)
    tick(None)
    found = {}
    for name, policy in plans.items():
        tick(f"asking under {name}")
        found[name] = run_policy(model, tokenizer, policy, questions)
        tick(None)
    tick("comparing decode speed")
    paces = speeds(model, tokenizer, plans, questions)
    tick(None)
    return Outcome(found, paces, questions, model.dtype)


def run_policy(
    model: Any, tokenizer: Any, policy: Policy, questions: tuple[Question, ...], watch: Watcher = unwatched
) -> Examination:
    """One row of the table; ``watch`` may look at the cache after every forward."""
    return examine(model, tokenizer, policy, load_document().text, questions, watch)


def speeds(model: Any, tokenizer: Any, plans: dict[str, Policy], questions: tuple[Question, ...]) -> dict[str, Pace]:
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
        return compare(model, caches, rounds=SPEED_ROUNDS, cycle_tokens=8)


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


def show(console: Console, outcome: Outcome) -> None:
    """Replies, table, bytes and verdict."""
    found, questions = outcome.found, outcome.questions
    for index, question in enumerate(questions):
        console.print(f"\n[bold]{question.question}[/bold] (the document says: {question.answer})")
        for name, result in found.items():
            reply = result.replies[index]
            mark = "[green]right[/green]" if reply.right else "[red]wrong[/red]"
            console.print(f"  {name}: {mark}, {reply.nats:.2f} nats: ", end="")
            console.print(" ".join(reply.text.split())[:110], markup=False, highlight=False)
    console.print()
    console.print(table(found, outcome.paces))
    for name, result in found.items():
        kinds = (f"{count / 2**20:.2f} MiB {kind}" for kind, count in result.finished.bytes_by_kind.items() if count)
        console.print(f"bytes of {name}: {', '.join(kinds)}")
    console.print(_legend(outcome.dtype), style="dim")
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
