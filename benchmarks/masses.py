"""Time of a prompt's masses, relative to the prefill that they come with and to causal attention.

    python benchmarks/masses.py [--tokens 4096] [--rounds 3]

The shape is SmolLM2-135M's: 30 layers, 9 query heads, 3 KV heads, head_dim 64; weights and keys are random. Masses and
attention of one layer are set against a thirtieth of the prefill (linear layers and attention, without the vocabulary).
All take turns; figures are medians of the rounds' ratios.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaModel

from qevict.backends.masses import Columns, masses
from qevict.backends.reference import ReferenceAttention
from qevict.contracts.backend import Known, Query, View

LAYERS, HEADS, GROUP, HEAD_DIM, SINKS, WINDOW = 30, 3, 3, 64, 5, 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    wish = parser.parse_args()
    jobs = contestants(wish.tokens)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    with torch.no_grad():
        for _ in range(wish.rounds):
            for name, job in jobs.items():
                start = time.perf_counter()
                job()
                seconds[name].append(time.perf_counter() - start)
    print(f"{'':24}{'of the prefill':>16}{'of causal attention':>22}")
    prefill = seconds.pop("prefill, 30 layers")
    for name, own in seconds.items():
        shares = LAYERS * _ratio(own, prefill), _ratio(own, seconds["causal attention"])
        print(f"{name:24}{shares[0]:16.3f}{shares[1]:22.2f}")


def contestants(tokens: int) -> dict[str, Callable[[], object]]:
    """What takes turns; one layer, but for the prefill."""
    windows = -(-(tokens - SINKS) // WINDOW)
    vectors = torch.randn(1, HEADS, GROUP, tokens, HEAD_DIM)
    keys = torch.randn(1, HEADS, SINKS + WINDOW * windows, HEAD_DIM)
    positions = torch.arange(keys.shape[2])[None]
    columns = Columns(keys, positions, positions < tokens, SINKS, WINDOW, windows)

    def some(since: int, step: int = 1, *, ragged: bool = False) -> Callable[[], object]:
        asked = slice(since, tokens, step)
        known = Known(tokens, 0 if ragged else tokens, step)
        query = Query(vectors[:, :, :, asked], positions[:, asked], HEAD_DIM**-0.5, known=known)
        return lambda: masses(query, columns)

    model = LlamaModel(
        LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS * GROUP,
            num_key_value_heads=HEADS,
            max_position_embeddings=2 * tokens,
        )
    ).eval()
    repeated = keys[:, :, :tokens].repeat_interleave(GROUP, 1)
    whole = Query(vectors, positions[:, :tokens], HEAD_DIM**-0.5)
    return {
        "prefill, 30 layers": lambda: model(torch.full((1, tokens), 7), use_cache=False),
        "causal attention": lambda: scaled_dot_product_attention(
            vectors.flatten(1, 2), repeated, repeated, is_causal=True
        ),
        "all queries": some(0),
        "all, as if ragged": some(0, ragged=True),
        "every 4th": some(3, 4),
        "every 16th": some(15, 16),
        "every 64th": some(63, 64),
        "last 256": some(tokens - 256),
        "last 32": some(tokens - 32),
        "reference, all queries": lambda: ReferenceAttention().mass(whole, _view(keys, windows, tokens)),
    }


def _view(keys: torch.Tensor, windows: int, tokens: int) -> View:
    pool = keys[0, :, SINKS:].unflatten(1, (windows, WINDOW))
    sinks, number = keys[:, :, :SINKS], torch.arange(windows)[None]
    present = torch.ones(1, windows, dtype=torch.bool)
    lengths = torch.tensor([tokens])
    first = SINKS + WINDOW * number
    return View(sinks, sinks, pool, pool, number, (), first, present, lengths, None, torch.zeros_like(lengths))


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(own / other for own, other in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
