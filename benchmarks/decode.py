"""Decode time of the reference backend at a long context, relative to transformers' DynamicCache.

    python benchmarks/decode.py [--tokens 4096] [--rounds 5] [--write]

All caches hold the same context and take turns, in whole cycles of 8 tokens with routing and packing included. Figures
are ratios of one run; ``--write`` records them under ``benchmarks/results/``.
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache

import qevict
from qevict import policies
from qevict.bench.models import load
from qevict.bench.prompts import load_document
from qevict.bench.speed import compare
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy

RESULTS = Path(__file__).parent / "results"


def contestants() -> dict[str, Policy]:
    """20 % of the bytes, in both stored dtypes."""
    half = torch.bfloat16
    return {
        "full, float32": policies.full(),
        "evict-only 20 %, float32": policies.evict_only("20 %"),
        "QEvict 20 %, float32": policies.qevict("20 %"),
        "evict-only 20 %, bfloat16": policies.evict_only("20 %", dtype=half),
        "QEvict 20 %, bfloat16": policies.qevict("20 %", dtype=half),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="record the figures under benchmarks/results/")
    wish = parser.parse_args()
    model, tokenizer = load()
    text = load_document().text
    ids = torch.tensor([tokenizer(f"{text}\n\n" * (wish.tokens // 800 + 1))["input_ids"][: wish.tokens]])
    found = measure(model, ids, wish.rounds)
    print(json.dumps(found, indent=1))
    if wish.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"decode-{wish.tokens}.json").write_text(json.dumps(found, indent=1) + "\n")


def measure(model: Any, ids: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Ratios by cache, and what they were taken on."""
    plans = contestants()
    stock = DynamicCache(config=model.config)
    caches: dict[str, Any] = {"DynamicCache": stock}
    with torch.no_grad(), qevict.attach(model, plans["full, float32"]):
        caches |= {name: qevict.Cache(model, plan) for name, plan in plans.items()}
        for cache in caches.values():
            model.base_model(ids, use_cache=True, **{CACHE_ARGUMENT: cache})
        paces = compare(model, caches, rounds=rounds, cycle_tokens=8)
    return {
        "command": f"python benchmarks/decode.py --tokens {ids.shape[1]} --rounds {rounds}",
        "model": "SmolLM2-135M-Instruct, computed in float32",
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "time relative to DynamicCache (median, quartiles)": {
            name: [round(pace.ratio, 2), round(pace.low, 2), round(pace.high, 2)] for name, pace in paces.items()
        },
        "exact bytes relative to a full cache of the stored dtype": {
            name: round(cache.report().exact_bytes / cache.report().full_bytes, 3)
            for name, cache in caches.items()
            if name in plans
        },
    }


if __name__ == "__main__":
    main()
