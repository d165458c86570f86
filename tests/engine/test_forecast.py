"""What is forecast is what a cache holds."""

from typing import Any

import attrs
import pytest
from tests.oracle import prompts, tiny

import qevict
from qevict import policies
from qevict.engine.forecast import forecast

MODEL = tiny("llama", num_hidden_layers=2)

POLICIES = {
    "qevict": policies.qevict("40 %"),
    "by head": attrs.evolve(policies.qevict("60 %", recent_tokens=16), granularity="kv_head"),
    "paper": policies.qevict("40 %", accounting="paper"),
    "evict-only": policies.evict_only("30 %", window_tokens=4),
    "full": policies.full(),
    "one encoded tier": attrs.evolve(
        policies.qevict("50 %", quantized_share=1.0),
        tiers=policies.qevict("50 %").tiers[1:],
        router=policies.evict_only("50 %").router,
    ),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("tokens", [3, 150, 400])
def test_windows_and_bytes_by_tier(name: str, tokens: int) -> None:
    ids, _ = prompts(tokens)
    with qevict.attach(MODEL, POLICIES[name]) as session:
        cache: Any = session.prefill(ids)
    seen, report = forecast(cache.wiring, tokens), cache.report()
    room = report.windows["protected"] - seen.windows["protected"]
    assert 0 <= room <= 2 * cache.wiring.lanes_per_row * 2, "room for tokens to come is opened with the event"
    assert {**seen.windows, "protected": 0} == {**report.windows, "protected": 0}
    assert {**seen.bytes_by_tier, "protected": 0} == {**report.bytes_by_tier, "protected": 0}
    opened = report.bytes_by_tier["protected"] - seen.bytes_by_tier["protected"]
    assert opened == room * cache.wiring.block_bytes[0]
    assert seen.full_bytes == report.full_bytes
    assert seen.budget_bytes == report.budget_bytes
    live = sum(report.windows.values()) - report.windows["protected"]
    aged = cache.wiring.aged_until(tokens) * 2 * cache.wiring.lanes_per_row
    assert live + seen.evicted_windows == aged


def test_what_is_never_ranked_and_what_a_window_costs() -> None:
    """By hand, for 2 layers of 2 KV heads with 16 channels in fp32."""
    with qevict.attach(MODEL, POLICIES["qevict"]) as session:
        seen = forecast(session.cache().wiring, 200)
    token, window_record = 2 * 2 * 16 * 4, 4 + 1 + 2 + 2 * 4 + 4  # identity, place, moves, two slots, one sum
    lane_table, row = 5 * 8, 2 * (8 + 1) + 8 * 4  # extents of two segments and a count; clock and rotary table
    reserved = -(-(32 + 7 + 8) // 8)  # a flag hides each token of a dense slot, and each encoded slot
    assert seen.floor_bytes == row + 2 * (5 * token + lane_table + reserved * (8 * token + 8 + window_record))
    codes = 2 * (8 * 16 * 2 // 8 + 16 * 4) + 2 * (8 * 16 * 2 // 8 + 8 * 4)
    assert seen.window_bytes == {"full": 8 * token + 8 + window_record, "int2": codes + 1 + window_record}
