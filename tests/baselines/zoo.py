"""Every preset of the baselines on tiny models: options that suit short prompts, and runs that tests share."""

import functools
import inspect
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import qevict
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy
from qevict.testing.footprint import reachable_bytes
from qevict_baselines.plugin import qevict_presets
from tests.oracle import Held, Watch, prompts, tiny

EVERY = {preset.__name__: preset for preset in qevict_presets()}
PRESETS = {name: preset for name, preset in EVERY.items() if "budget" in inspect.signature(preset).parameters}
"""Those that evict; what only quantises has no budget, and a module of its own."""

OPTIONS: dict[str, dict[str, Any]] = {
    "ada_criticalkv": {"observed_tokens": 8},
    "ada_qevict": {},
    "adakv": {"observed_tokens": 8},
    "critical_qevict": {},
    "criticalkv": {"observed_tokens": 8},
    "decayed_qevict": {},
    "defensive_qevict": {},
    "defensivekv": {"observed_tokens": 8},
    "diverse_qevict": {"newest_tokens": 8, "group_channels": 8},
    "expected_attention": {"future_tokens": 16},
    "h2o": {},
    "handover_qevict": {},
    "key_norms": {},
    "keydiff": {"period_tokens": 4},
    "kvzip": {"repeat_tokens": 32, "instruction": (5, 6)},
    "layer_defensivekv": {"observed_tokens": 8},
    "normalised_qevict": {},
    "observed_attention": {},
    "per_head_qevict": {},
    "pyramid_qevict": {},
    "pyramidkv": {"observed_tokens": 8},
    "random_eviction": {},
    "snapkv": {"observed_tokens": 8},
    "streaming_llm": {},
    "tova": {},
}
"""What each preset is tested with."""

NAMES = tuple(OPTIONS)
ALIKE = {
    "ada_criticalkv",
    "ada_qevict",
    "critical_qevict",
    "decayed_qevict",
    "defensive_qevict",
    "expected_attention",
    "key_norms",
    "normalised_qevict",
    "observed_attention",
    "per_head_qevict",
    "pyramid_qevict",
    "pyramidkv",
    "random_eviction",
}
"""Presets whose parts, or parts like theirs, others have: what is of the engine runs on them with the slow tests."""

SAMPLED = [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in NAMES]
TIERED = tuple(name for name in NAMES if name.endswith("_qevict"))
EVICTING = tuple(name for name in NAMES if name not in TIERED)
LENGTHS = (5, 70, 110)
NEW = 9
FIRST = 7
"""The token that is read first behind every prompt."""


def budget_of(name: str) -> str:
    """A budget under which a prompt of 70 tokens is compressed, with whatever the preset protects."""
    return "35 %" if name in TIERED else "40 %"


def policy_of(name: str, budget: Any = None, **options: Any) -> Policy:
    """The preset for tiny prompts, of which QEvict's 37 protected tokens would leave nothing to rank."""
    policy = PRESETS[name](budget_of(name) if budget is None else budget, **(OPTIONS[name] | options))
    return attrs.evolve(policy, sink_tokens=2, recent_tokens=8) if name in TIERED else policy


@functools.cache
def model_of(family: str = "llama", impl: str = "sdpa", **sizes: Any) -> Any:
    """A tiny model that tests share."""
    return tiny(family, impl=impl, **({"num_hidden_layers": 2} | sizes))


@attrs.frozen(eq=False)
class Zoo:
    """A prompt that was read, and what was decoded behind it.

    Attributes:
        sequences: prompt, the token read first, and what was generated.
        mask: of the prompt.
        logits: of every forward behind the prompt.
        watch: what was held at the prompt's end and after each of these forwards.
        kept: true positions at the prompt's end, by layer and lane.
        cache: as it was left.
        reported: reports at the prompt's end and after each forward.
        stored: bytes of distinct storages, likewise.
    """

    sequences: Tensor
    mask: Tensor
    logits: list[Tensor]
    watch: list[dict[int, Held]]
    kept: list[list[list[int]]]
    cache: Any
    reported: list[Any]
    stored: list[int]

    def text(self, row: int) -> list[int]:
        """What was generated."""
        return self.sequences[row, self.mask.shape[1] :].tolist()


class _Notes(Watch):
    """Notes bytes as well."""

    def __init__(self, cache: Any, model: Any) -> None:
        super().__init__(cache, model)
        self.reported: list[Any] = []
        self.stored: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.reported.append(self.cache.report())
        self.stored.append(reachable_bytes(self.cache))
        return super().__call__(input_ids, scores)


def kept_of(cache: Any) -> list[list[list[int]]]:
    """True positions by layer and lane."""
    return [cache.kept_positions(layer) for layer in cache.ruled_layers]


def decode(session: Any, cache: Any, ids: Tensor, mask: Tensor, new: int = NEW) -> Zoo:
    """Greedy decoding behind a prompt that was read; it begins with the same token everywhere."""
    notes, kept = _Notes(cache, session.model), kept_of(cache)
    first = torch.full((len(ids), 1), FIRST)
    notes(ids, ids)
    out = session.generate(
        first,
        cache=cache,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        logits_processor=[notes],
    )
    sequences = torch.cat((ids, out.sequences), dim=1)
    return Zoo(sequences, mask, list(out.logits), notes.steps, kept, cache, notes.reported, notes.stored)


def run(
    policy: Policy, model: Any, ids: Tensor, mask: Tensor | None = None, new: int = NEW, chunk: int | None = None
) -> Zoo:
    """Read and decode."""
    with qevict.attach(model, policy) as session:
        cache = session.prefill(ids, mask, chunk_tokens=chunk)
        return decode(session, cache, ids, torch.ones_like(ids) if mask is None else mask, new)


@torch.no_grad()
def steps(model: Any, cache: Any, new: int = NEW) -> tuple[list[int], list[Tensor]]:
    """What one row says behind its prompt, and the logits, by a hand loop that gives neither positions nor a mask."""
    token, text, found = torch.full((1, 1), FIRST), [FIRST], []
    for _ in range(new):
        found.append(model(token, **{CACHE_ARGUMENT: cache}).logits[:, -1])
        token = found[-1].argmax(-1)[:, None]
        text.append(int(token))
    return text, found


@functools.cache
def batch_of(name: str) -> Zoo:
    """A left-padded batch under a preset."""
    return run(policy_of(name), model_of(), *prompts(*LENGTHS))


@functools.cache
def solo_of(name: str) -> Zoo:
    """The middle row of the batch, alone."""
    ids, _ = prompts(*LENGTHS)
    return run(policy_of(name), model_of(), ids[1:2, -LENGTHS[1] :])
