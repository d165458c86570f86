"""Who takes part: stock caches and policies, each with the attention that it runs under, and what it holds."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import attrs
import torch
from transformers import DynamicCache

import qevict
from benchmarks import packed
from benchmarks.naive import NaiveRebuild
from benchmarks.synthetic import fill, geometry_of
from qevict import policies
from qevict.backends.flash import FlashAttention
from qevict.backends.reference import ReferenceAttention
from qevict.hf.names import name_for
from qevict.hf.recording import Recording
from qevict.policy import Policy
from qevict.scorers.cumulative import CumulativeAttention

STOCK, PACKED = "DynamicCache", "packed SDPA"
NOT_MEASURED = {"QuantizedCache, quanto": "optimum.quanto", "QuantizedCache, HQQ": "hqq", "kvpress": "kvpress"}
"""Competitors that have no stand here yet, by the package that they would need."""

FILL_QUERIES = 32
"""Queries of a synthetic context whose masses start the scores: enough to rank by, and a cheap fill."""


@attrs.frozen(eq=False)
class Contestant:
    """A kind of cache.

    Attributes:
        implementation: the model's attention implementation under which it runs.
        make: an empty cache, given a model to which :func:`arena` has attached everything.
        backend: what attends, for caches that no policy rules.
    """

    implementation: str
    make: Callable[[Any], Any]
    backend: str = ""


Field = Mapping[str, Contestant]


@attrs.frozen
class Holding:
    """What a cache holds.

    Attributes:
        tokens_attended: by row, mean over the layers.
        exact_bytes: bytes of everything allocated.
        full_bytes: what a full cache in the stored dtype holds.
        backend: what attends.
        stored: dtype of full precision in the cache.
        computed: dtype of the model.
        threads: CPU threads.
    """

    tokens_attended: tuple[float, ...]
    exact_bytes: int
    full_bytes: int
    backend: str
    stored: str
    computed: str
    threads: int


def stock_field() -> dict[str, Contestant]:
    """What comes with transformers and torch; the first is the baseline of every measurement."""
    return {
        STOCK: Contestant("sdpa", lambda model: DynamicCache(config=model.config), "sdpa"),
        PACKED: Contestant(packed.NAME, packed.packed_cache, "sdpa, packed"),
    }


def by_policy(policy: Policy) -> Contestant:
    """A cache that a policy rules."""
    own = name_for("sdpa")
    assert own is not None
    return Contestant(own, lambda model: qevict.Cache(model, policy))


def plans(budget: str, computed: torch.dtype) -> dict[str, Policy]:
    """The presets under their own backends, in every dtype worth storing, and QEvict's tiers read in slower ways."""
    found: dict[str, Policy] = {}
    for dtype in dict.fromkeys((computed, torch.bfloat16)):
        stored = f"stored {name_of(dtype)}"
        ours = policies.qevict(budget, dtype=dtype)
        found |= {
            f"full, {stored}": policies.full(dtype=dtype),
            f"evict-only {budget}, {stored}": policies.evict_only(budget, dtype=dtype),
            f"QEvict {budget}, {stored}": ours,
        }
        found[f"QEvict {budget}, {stored}, flash backend"] = attrs.evolve(ours, backend=FlashAttention())
        found[f"QEvict {budget}, {stored}, reference backend"] = attrs.evolve(ours, backend=ReferenceAttention())
        found[f"QEvict {budget}, {stored}, naive rebuild"] = attrs.evolve(ours, backend=NaiveRebuild())
    return found


def cheap_to_fill(policy: Policy) -> Policy:
    """The policy with scores that start from the last queries of the prompt; decoding is the same."""
    scorer = policy.scorer
    if not isinstance(scorer, CumulativeAttention):
        return policy
    return attrs.evolve(policy, scorer=attrs.evolve(scorer, prompt_queries=FILL_QUERIES))


def not_measured() -> dict[str, str]:
    """Why a competitor is missing."""
    return {
        name: f"{package} is installed, but no fair way to run it here is written yet"
        if _installed(package)
        else f"{package} is not installed"
        for name, package in NOT_MEASURED.items()
    }


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package above it is missing
        return False


@contextmanager
def arena(model: Any, field: Field) -> Iterator[Callable[[str], None]]:
    """Attach everything to the model; gives what switches its attention to that of a contestant."""
    packed.register()

    def switch(name: str) -> None:
        model.set_attn_implementation(field[name].implementation)

    with qevict.attach(model, policies.full()), torch.no_grad():
        yield switch


def filled(model: Any, field: Field, recording: Recording, switch: Callable[[str], None]) -> dict[str, Any]:
    """A cache of every contestant that holds the context."""
    caches = {}
    for name, each in field.items():
        switch(name)
        caches[name] = each.make(model)
        fill(caches[name], recording)
    return caches


def holding(cache: Any, contestant: Contestant, model: Any) -> Holding:
    """Ask a filled cache what it holds."""
    common = (name_of(model.dtype), torch.get_num_threads())
    if isinstance(cache, qevict.Cache):
        report = cache.report()
        own = (report.exact_bytes, report.full_bytes, report.backend, report.dtype)
        return Holding(_attended(cache, len(report.tokens)), *own, *common)
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    rows, tokens = tensors[0].shape[0], cache.get_seq_length()
    exact = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    sizes = attrs.evolve(geometry_of(model), dtype=tensors[0].dtype)
    full = rows * tokens * sizes.token_bytes * sizes.layers
    return Holding((float(tokens),) * rows, exact, full, contestant.backend, name_of(tensors[0].dtype), *common)


def _attended(cache: qevict.Cache, rows: int) -> tuple[float, ...]:
    """Tokens held by row, mean over layers and lanes."""
    layers = range(cache.wiring.geometry.layers)
    counts = torch.tensor([[len(lane) for lane in cache.kept_positions(layer)] for layer in layers]).double()
    return tuple(counts.unflatten(1, (rows, -1)).mean(dim=(0, 2)).tolist())


def name_of(dtype: torch.dtype) -> str:
    """``float32`` rather than ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
