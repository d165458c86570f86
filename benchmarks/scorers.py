"""Which scorer loses least on QEvict's tiers: on facts that are asked for later, and on how the text goes on.

    python benchmarks/scorers.py [--prompts 48] [--budget "20 %"] [--write]

Facts are those of ``qevict bench needle``. For the continuation, the first tokens of a shipped text are compressed and
the next ones are read in one forward; figures are nats per token. All contestants hold the same exact bytes.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

import qevict
from qevict import policies
from qevict.bench.examination import reply_nats
from qevict.bench.figures import as_record, claims, figures, legend, table
from qevict.bench.models import load, quiet_libraries
from qevict.bench.needle import FULL, STORED, Contestant, Score, measure
from qevict.bench.needles import load_haystack, load_needles
from qevict.bench.provenance import provenance
from qevict.cli.console import console, progress
from qevict.contracts.scorer import Scorer
from qevict.scorers.cumulative import CumulativeAttention
from qevict_baselines.accumulators import DecayedAttention, NormalisedAttention
from qevict_baselines.handover import Handover
from qevict_baselines.keydiff import KeyDiff
from qevict_baselines.snapkv import ObservationWindow

RESULT = Path(__file__).parent / "results" / "scorers.json"
OURS = "cumulative attention"
SCORERS: Mapping[str, Scorer] = {
    OURS: CumulativeAttention(),
    "attention per query": NormalisedAttention(),
    "decayed attention": DecayedAttention(),
    "last 32 queries": ObservationWindow(kernel=1),
    "key difference": KeyDiff(),
    "key difference before RoPE": KeyDiff("pre_rope"),
    "handed over, share 0.3": Handover(0.3),
    "handed over, share 0.5": Handover(0.5),
    "handed over, share 0.7": Handover(0.7),
}
CONTEXT_TOKENS, NEXT_TOKENS = 640, 128


def contestants(budget: str) -> dict[str, Contestant]:
    """QEvict with one scorer or another, beside the full cache."""
    base = policies.qevict(budget, dtype=STORED)
    field = {FULL: Contestant(policies.full(dtype=STORED), None)}
    return field | {
        name: Contestant(attrs.evolve(base, scorer=scorer), FULL if name == OURS else OURS)
        for name, scorer in SCORERS.items()
    }


def continue_texts(
    model: Any, tokenizer: Any, field: Mapping[str, Contestant], texts: Sequence[str], tick: Callable[[], None]
) -> dict[str, list[Score]]:
    """Nats per token of what follows a compressed text."""
    found: dict[str, list[Score]] = {name: [] for name in field}
    with qevict.attach(model, policies.full()) as session:
        for text in texts:
            ids = torch.tensor([tokenizer(load_haystack(text)).input_ids[: CONTEXT_TOKENS + NEXT_TOKENS + 1]])
            context, first, rest = ids[:, :CONTEXT_TOKENS], ids[:, CONTEXT_TOKENS : CONTEXT_TOKENS + 1], ids[0]
            recording = session.record(context)
            for name, own in field.items():
                cache = qevict.Cache(model, own.policy)
                recording.play_into(cache)
                report = cache.report()
                nats = float(reply_nats(model, cache, first, rest[CONTEXT_TOKENS + 1 :].tolist()).mean())
                shares = report.exact_bytes / report.full_bytes, report.paper_bytes / report.full_bytes
                found[name].append(Score(nats, nats, *shares))
                tick()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=48, help="how many of the shipped prompts, at least 2")
    parser.add_argument("--budget", default="20 %")
    parser.add_argument("--write", action="store_true", help="record the figures under benchmarks/results/")
    wish = parser.parse_args()
    field, needles = contestants(wish.budget), load_needles()[: wish.prompts]
    texts = list(dict.fromkeys(needle.haystack for needle in needles))
    quiet_libraries()
    with progress((len(needles) + len(texts)) * len(field)) as tick:
        model, tokenizer = load(progress=tick)
        tick("reading and answering")
        plans = {name: own.policy for name, own in field.items()}
        facts = figures(field, measure(model, tokenizer, plans, needles, lambda: tick(None)))
        texts_go_on = figures(field, continue_texts(model, tokenizer, field, texts, lambda: tick(None)))
    screen = console()
    record: dict[str, Any] = {"command": shlex.join(["python", "benchmarks/scorers.py", *sys.argv[1:]])}
    for what, rows, count in (("facts", facts, len(needles)), ("continuation", texts_go_on, len(texts))):
        screen.print(f"\n{what}, {count} prompts", table(rows), legend(count))
        for claim in claims(rows):
            screen.print(f"* {claim}", highlight=False, markup=False)
        record[what] = as_record(rows, command=record["command"], prompts=count, **provenance(model))
    if wish.write:
        RESULT.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
