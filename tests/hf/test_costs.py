"""What a decode step may cost: no host synchronisation, a fixed number of operators, bytes that follow the moves."""

from collections import Counter
from typing import Any

import attrs
import pytest
import torch
from tests.oracle import impls, prompts, tiny

import qevict
from qevict import policies
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.testing import Operators


def decode(model: Any, cache: Any, mask: Any, steps: int) -> list[Operators]:
    """Decode by hand, one operator count per step."""
    counts = []
    for _ in range(steps):
        new = torch.randint(3, 97, (mask.shape[0], 1))
        mask = torch.cat((mask, torch.ones_like(new)), dim=1)
        with torch.no_grad(), Operators() as seen:
            model(new, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, **{CACHE_ARGUMENT: cache})
        counts.append(seen)
    return counts


POLICIES = {
    "full": policies.full(),
    "sinks_recent": policies.sinks_recent("40 %"),
    "evict_only": policies.evict_only("40 %"),
    "qevict": policies.qevict("40 %"),
    "per_head": attrs.evolve(policies.qevict("60 %"), granularity="kv_head"),
}


def run(policy: Any, *lengths: int, steps: int = 17, family: str = "llama", **sizes: Any) -> list[Operators]:
    """Operator counts of a decode under a policy."""
    model = tiny(family, impl=impls(family)[0], **sizes)
    ids, mask = prompts(*lengths)
    with qevict.attach(model, policy) as session:
        return decode(model, session.prefill(ids, mask), mask, steps)


@pytest.mark.parametrize("name", POLICIES)
def test_no_synchronisation_between_events_and_one_at_an_event(name: str) -> None:
    """Steps 8 and 16 are events; the others must not wait for the device at all."""
    counts = run(POLICIES[name], 160, 90)
    stock = run_stock(160, 90)
    for step, seen in enumerate(counts, start=1):
        waits = seen.waits - stock.waits
        assert sum(waits.values()) <= (step % 8 == 0), f"step {step} waits: {dict(waits)}"


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss", "phi3_partial"])
def test_caps_sinks_local_layers_and_partial_rope_wait_for_nothing_more(family: str) -> None:
    counts = run(POLICIES["qevict"], 160, 90, steps=7, family=family)
    stock = run_stock(160, 90, family=family)
    for seen in counts:
        assert not seen.waits - stock.waits


def run_stock(*lengths: int, family: str = "llama") -> Operators:
    """What one step of the stock cache asks of the device."""
    model = tiny(family, impl=impls(family)[0])
    ids, mask = prompts(*lengths)
    with torch.no_grad():
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        model(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache})
        return decode(model, cache, mask, 1)[0]


@pytest.mark.parametrize("name", POLICIES)
def test_operator_count_depends_on_neither_windows_nor_rows_nor_heads(name: str) -> None:
    """The same step of a short and a long context, one row or four, two KV heads of 16 channels or four."""
    base = sum(run(POLICIES[name], 160, 160, steps=3)[2].names.values())
    assert base == sum(run(POLICIES[name], 480, 480, steps=3)[2].names.values())
    assert base == sum(run(POLICIES[name], 160, 160, 160, 160, steps=3)[2].names.values())
    more: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    assert base == sum(run(POLICIES[name], 160, 160, steps=3, **more)[2].names.values())


def test_bytes_moved_at_an_event_follow_the_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool writes of a long decode grow with windows moved and tokens that came, not with the cache."""
    from qevict.stores.memory import MemoryPool

    written = Counter[str]()
    plain_write, plain_repack = MemoryPool.write, MemoryPool.repack

    def write(pool: Any, slots: Any, codes: Any) -> None:
        written["write"] += len(slots)
        plain_write(pool, slots, codes)

    def repack(pool: Any, slots: Any, into: Any, capacity: int) -> None:
        written["repack"] += len(slots)
        plain_repack(pool, slots, into, capacity)

    monkeypatch.setattr(MemoryPool, "write", write)
    monkeypatch.setattr(MemoryPool, "repack", repack)
    model = tiny("llama", num_hidden_layers=1)
    per_token = []
    for length in (256, 1024):
        ids, mask = prompts(length)
        with qevict.attach(model, policies.qevict("40 %")) as session:
            cache = session.prefill(ids, mask)
            written.clear()
            decode(model, cache, mask, 128)
        assert written["write"] <= 128 // 8 * 4
        per_token.append(written["repack"] / 128)
    assert per_token[1] <= 1.5 * per_token[0] + 1
