"""Case C19, what can be counted: a quantizer sees each token once, and memory that is only evicted from stays put."""

import itertools
from typing import Any, ClassVar

import attrs
import pytest
import torch
from tests.oracle import tiny
from torch import Tensor

import qevict
from qevict import policies
from qevict.contracts.quantizer import NOTHING_SHARED, Quantizer
from qevict.contracts.values import Codes, Layout
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.ledgers.migration_stable import MigrationStable
from qevict.policy import Policy, Tier
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.recency import Recency
from qevict.stores.memory import DeviceMemory

LAYERS, STEPS, PROMPT, RESIDUAL, WINDOW = 2, 256, 4096, 32, 32
MODEL = tiny("llama", num_hidden_layers=LAYERS, max_position_embeddings=8192)


@attrs.frozen
class Counting(Quantizer):
    """Notes how many tokens each call of ``encode`` is given."""

    name: ClassVar[str] = "counting"
    quantizer: PerChannel | PerToken
    encoded: list[int] = attrs.field(factory=list, eq=False)
    bits: int = 2
    min_snr_db: float = 0.0

    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        return self.quantizer.layout(window_tokens, head_dim)

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        self.encoded.append(x.shape[1] * x.shape[2])
        return self.quantizer.encode(x)

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        return self.quantizer.decode(codes, head_dim)


def decoded(policy: Policy, prompt: int, steps: int, note: Any = None) -> Any:
    """A cache after a prompt and single tokens."""
    ids = torch.randint(3, 97, (1, prompt + steps), generator=torch.Generator().manual_seed(1))
    with qevict.attach(MODEL, policy) as session, torch.no_grad():
        cache = session.prefill(ids[:, :prompt])
        for token in range(prompt, prompt + steps):
            MODEL(ids[:, token : token + 1], **{CACHE_ARGUMENT: cache})
            if note is not None:
                note(cache)
    return cache


@pytest.mark.parametrize("period", [8, 32])
def test_each_token_is_quantised_once_as_it_ages(period: int) -> None:
    keys, values = Counting(PerChannel(2)), Counting(PerToken(2))
    policy = Policy(
        scorer=Recency(),
        router=GreedyTiers(),
        tiers=(Tier("int2", keys, values, store=DeviceMemory()),),
        ledger=MigrationStable(),
        window_tokens=WINDOW,
        period_tokens=period,
        sink_tokens=0,
        recent_tokens=RESIDUAL,
    )
    cache = decoded(policy, PROMPT, STEPS)
    aged = sum(int((layer.records.place == 0).sum()) * WINDOW for layer in cache.engine.layers)
    assert aged == LAYERS * (PROMPT + STEPS - RESIDUAL)
    for quantizer in (keys, values):
        assert sum(quantizer.encoded) == aged
        assert len(quantizer.encoded) <= LAYERS * (STEPS // WINDOW + 1)


@pytest.mark.parametrize(("budget", "most"), [("400 tokens", 0), ("40 %", 128 // 8 // 2)])
def test_memory_that_is_only_evicted_from_stays_where_it_is_between_events(budget: str, most: int) -> None:
    """Slots that are freed are used again; a budget that grows is followed in steps, at events."""
    places: list[tuple[int, ...]] = []

    def note(cache: Any) -> None:
        arrays = [array for layer in cache.engine.layers for array in layer.pools[0].lend().values()]
        places.append(tuple(array.data_ptr() for array in arrays))

    decoded(policies.evict_only(budget, dtype=torch.bfloat16), 1024, 128, note)
    moved = [step for step, (one, other) in enumerate(itertools.pairwise(places), start=2) if one != other]
    assert all(step % 8 == 0 for step in moved), f"storage moved between events, at steps {moved}"
    assert len(moved) <= most, f"storage moved at steps {moved}"
