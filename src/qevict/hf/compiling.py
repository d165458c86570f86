"""What ``torch.compile`` does with a model that a policy is attached to."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run as it stands where the model is compiled: graphs end before it and begin after it.

    A cache counts tokens on the host. Traced, each count would make a new graph for every forward.
    """
    kept: Callable[P, T] = torch.compiler.disable(
        function, reason="a qevict cache is not compiled; drop fullgraph=True, and the rest of the model is"
    )
    return kept
