"""Parameters of scaled RoPE, made for texts so short that tests go far beyond."""

from typing import Any

ORIGINAL = 64
"""Positions that the scaled tables were made for."""

EXACT: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
}
"""Tables that stay as they are."""


def changing(head_dim: int) -> dict[str, dict[str, Any]]:
    """Tables that change with the length of a text."""
    pairs = head_dim // 2
    factors = {"short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs}
    return {
        "dynamic": {"factor": 2.0},
        "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, **factors},
    }
