"""The compiled operator, if it was built and can be loaded here."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@functools.cache
def missing() -> str | None:
    """Why there is no operator; None if there is one, which is loaded then."""
    built = sorted(Path(__file__).parent.glob("_operator*.so"))
    if not built:
        return "its operator was not built: that takes GCC 12 or Clang, on Linux or macOS; `pip install -v` says more"
    try:
        torch.ops.load_library(str(built[0]))
    except OSError as error:
        return f"its operator cannot be loaded: {error.__cause__ or error}"
    torch.library.register_fake("qevict_fused::attend", _shapes, allow_override=True)
    return None


def _shapes(queries: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and masses of nothing in particular, for what traces a model."""
    names = [each.name for each in torch.ops.qevict_fused.attend.default._schema.arguments]  # noqa: SLF001 - no other way
    given = dict(zip(names[1:], others, strict=True))
    windows, want_mass = given["windows"], given["want_mass"]
    lanes, heads, group = queries.shape[:3]
    masses = (lanes, heads * group, windows.shape[1] + 1 if want_mass else 0)
    lse = queries.new_empty(queries.shape[:4], dtype=torch.float32)
    return torch.empty_like(queries, memory_format=torch.contiguous_format), lse, lse.new_empty(masses)


def instruction_set() -> str:
    """What the operator runs on unless told otherwise: ``"avx2"`` or ``"portable"``."""
    name: str = torch.ops.qevict_fused.instruction_set()
    return name
