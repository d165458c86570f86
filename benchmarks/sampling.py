"""What it costs to score a prompt by a sample of its queries: nats per answer token, beside those of all queries.

    python benchmarks/sampling.py [--prompts 48] [--budget "20 %"] [--write]

Prompts, figures and intervals are those of ``qevict bench needle``. ``observe_tokens`` is not among the contestants:
there, question and answer follow in one forward, and no routing event comes before the answer is scored.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import attrs

from qevict import policies
from qevict.bench.figures import as_record, claims, figures, legend, table
from qevict.bench.models import load, quiet_libraries
from qevict.bench.needle import STORED, Contestant, measure
from qevict.bench.needles import load_needles
from qevict.bench.provenance import provenance
from qevict.cli.console import console, progress
from qevict.scorers.cumulative import CumulativeAttention

RESULT = Path(__file__).parent / "results" / "sampling.json"
ALL = "all queries"
SCORERS = {
    ALL: CumulativeAttention(),
    "every 4th": CumulativeAttention(prompt_stride=4),
    "every 16th": CumulativeAttention(prompt_stride=16),
    "every 64th": CumulativeAttention(prompt_stride=64),
    "last 256": CumulativeAttention(prompt_queries=256),
    "last 32": CumulativeAttention(prompt_queries=32),
}


def contestants(budget: str) -> dict[str, Contestant]:
    """QEvict with one scorer or another."""
    base = policies.qevict(budget, dtype=STORED)
    return {
        name: Contestant(attrs.evolve(base, scorer=scorer), None if name == ALL else ALL)
        for name, scorer in SCORERS.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=48, help="how many of the shipped prompts, at least 2")
    parser.add_argument("--budget", default="20 %")
    parser.add_argument("--write", action="store_true", help="record the figures under benchmarks/results/")
    wish = parser.parse_args()
    field, needles = contestants(wish.budget), load_needles()[: wish.prompts]
    quiet_libraries()
    with progress(len(needles) * len(field)) as tick:
        model, tokenizer = load(progress=tick)
        tick("reading and answering")
        plans = {name: own.policy for name, own in field.items()}
        rows = figures(field, measure(model, tokenizer, plans, needles, lambda: tick(None)))
    screen = console()
    screen.print(table(rows))
    screen.print(f"\n{legend(len(needles))}", highlight=False, markup=False)
    for claim in claims(rows):
        screen.print(f"* {claim}", highlight=False, markup=False)
    if wish.write:
        command = shlex.join(["python", "benchmarks/sampling.py", *sys.argv[1:]])
        record = as_record(rows, command=command, prompts=len(needles), **provenance(model))
        RESULT.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
