"""``torch.compile`` with a policy attached: the same bits, and no new graph for a later token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import prompts, tiny

import qevict
from qevict import policies
from qevict.hf.compat import CACHE_ARGUMENT

POLICY = policies.qevict("40 %", period_tokens=8)


@torch.no_grad()
def steps(model: Any, count: int) -> torch.Tensor:
    """Logits of a prompt and of single tokens after it, across routing events."""
    found, (ids, _) = [], prompts(80)
    with qevict.attach(model, POLICY) as session:
        cache = session.cache()
        for _ in range(count):
            found.append(model(ids, **{CACHE_ARGUMENT: cache}).logits[:, -1])
            ids = found[-1].argmax(-1)[:, None]
    return torch.cat(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "layers"), [("model", 1), pytest.param("layers", 2, marks=pytest.mark.exhaustive)], ids=["model", "layers"]
)
def test_compiled_equals_eager_and_makes_no_graph_for_a_later_token(what: str, layers: int) -> None:
    """Graphs are made for the prompt and for the first tokens after it, and never again."""
    expected = steps(tiny(num_hidden_layers=layers), 24)
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    model = tiny(num_hidden_layers=layers)
    for module in [model] if what == "model" else model.model.layers:
        module.compile(backend=counting)
    assert torch.equal(steps(model, 3), expected[:3])
    made = len(graphs)
    assert made
    assert torch.equal(steps(model, 24), expected)
    assert len(graphs) == made
    torch._dynamo.reset()
