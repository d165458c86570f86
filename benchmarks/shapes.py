"""A model with the layers of a large one, but few, and random weights: ``python -m benchmarks.shapes 8b FOLDER``.

What a layer costs depends on its sizes alone, so that ``--model FOLDER`` tells how much of a large model's step is its
cache. Output words are left out, since with few layers they would weigh more than they do.
"""

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
}
"""Layers of Llama 3.2 1B and of Llama 3.1 8B, as their model cards say."""


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, default=2)
    asked = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[asked.shape], num_hidden_layers=asked.layers, vocab_size=256, max_position_embeddings=2**15
    )
    LlamaForCausalLM(config).save_pretrained(asked.folder)


if __name__ == "__main__":
    main()
