"""The compiled operator, if it was built and can be loaded here."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY = "_operator.abi3.so"


@functools.cache
def missing() -> str | None:
    """Why there is no operator; None if there is one, which is loaded then."""
    path = Path(__file__).parent / LIBRARY
    if not path.is_file():
        return "its operator was not built; install it where GCC or Clang is, on Linux or macOS, and read what pip says"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"its operator cannot be loaded: {error.__cause__ or error}"
    torch.library.register_fake("qevict_fused::attend", _shapes)
    return None


def _shapes(queries: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and masses of nothing in particular, for what traces a model."""
    windows, want_mass = given[9], given[17]
    lanes, heads, group = queries.shape[:3]
    masses = (lanes, heads * group, windows.shape[1] + 1 if want_mass else 0)
    lse = queries.new_empty(queries.shape[:4], dtype=torch.float32)
    return torch.empty_like(queries, memory_format=torch.contiguous_format), lse, lse.new_empty(masses)


def instruction_set() -> str:
    """What the operator runs on unless told otherwise: ``"avx2"`` or ``"portable"``."""
    name: str = torch.ops.qevict_fused.instruction_set()
    return name
