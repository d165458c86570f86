"""The report as a value, as JSON and as a table: three forms of the same numbers."""

import json
from typing import Any

import attrs
import pytest
import torch
from tests.oracle import prompts, tiny

import qevict
from qevict import policies
from qevict.engine.tables import in_units

MODEL = tiny("llama", num_hidden_layers=2)


def filled(policy: Any, *lengths: int) -> Any:
    ids, mask = prompts(*lengths)
    with qevict.attach(MODEL, policy) as session:
        cache = session.prefill(ids, mask)
        session.generate(ids[:, -3:], cache=cache, max_new_tokens=30, do_sample=False)
    return cache


@pytest.fixture(scope="module")
def cache() -> Any:
    return filled(policies.qevict("60 %"), 150, 90)


def test_kinds_are_counted_from_what_lies_in_the_pools(cache: Any) -> None:
    """By hand: slots in use by where their window lives, and codes by the bits of their quantizers."""
    kinds, layers, wiring = cache.report().bytes_by_kind, cache.engine.layers, cache.wiring
    assert kinds["ledger copies"] > 0
    living = promoted = free = 0
    for layer in layers:
        slots, place = layer.records.slots, layer.records.place
        living += int(((slots[:, 1] >= 0) & (place == 1)).sum())
        promoted += int(((slots[:, 1] >= 0) & (place != 1)).sum())
        free += layer.pools[1].capacity - int((slots[:, 1] >= 0).sum())
    window_codes = 2 * 2 * 8 * 16 * 2 // 8  # keys and values, KV heads, tokens, head_dim, bits
    assert kinds["codes"] == living * window_codes
    assert kinds["codes"] + kinds["scales and zero points"] == living * wiring.block_bytes[1]
    assert kinds["ledger copies"] == promoted * wiring.block_bytes[1]
    assert kinds["free slots"] >= free * wiring.block_bytes[1]
    assert kinds["sinks"] == 2 * 2 * 2 * 2 * 5 * 16 * 4
    assert sum(kinds.values()) == cache.report().exact_bytes


def test_tiers_hold_their_windows(cache: Any) -> None:
    report, block = cache.report(), cache.wiring.block_bytes
    assert report.bytes_by_tier["full"] == report.windows["full"] * block[0]
    assert report.bytes_by_tier["int2"] == report.windows["int2"] * block[1]
    assert report.bytes_by_tier["protected"] == report.windows["protected"] * block[0] + report.bytes_by_kind["sinks"]


def test_json_is_the_value(cache: Any) -> None:
    report = cache.report()
    read = json.loads(report.to_json())
    assert read == json.loads(json.dumps(attrs.asdict(report)))
    assert type(report)(**(read | {"tokens": tuple(read["tokens"])})) == report


def test_the_table_says_the_same(cache: Any) -> None:
    report = cache.report()
    text = str(report)
    for words in ("protected", "ledger copies", "of a full cache", "60.0 %", "promotions", "codes read in place"):
        assert words in text
    for count in (report.exact_bytes, report.paper_bytes, report.budget_bytes):
        assert in_units(count) in text
    assert "over the budget" not in text


def test_an_overshoot_is_named() -> None:
    report = filled(policies.evict_only("5 %"), 60).report()
    assert report.overshoot_bytes > 0
    assert f"over the budget by {in_units(report.overshoot_bytes)}" in str(report).replace("\n", " ")


def test_an_empty_cache_reports_too() -> None:
    with qevict.attach(MODEL, policies.qevict("60 %", dtype=torch.float16)) as session:
        report = session.cache().report()
    assert (report.tokens, report.full_bytes, sum(report.windows.values()), report.dtype) == ((), 0, 0, "float16")
    assert "no tokens" in str(report)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (5 * 2**30, "5 GiB")]
)
def test_units(count: int, text: str) -> None:
    assert in_units(count) == text
    assert in_units(2**60).endswith("TiB")
