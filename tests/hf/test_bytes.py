"""Reported bytes are the bytes really held, at every step, and the budget law holds over them."""

from typing import Any

import attrs
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.oracle import prompts, tiny

import qevict
from qevict import policies
from qevict.engine.forecast import forecast
from qevict.engine.wiring import stepped
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.testing.footprint import reachable_bytes

MODEL = tiny("llama", num_hidden_layers=2)


def feed(policy: Any, lengths: tuple[int, ...], steps: list[int], model: Any = MODEL) -> Any:
    """Prefill and then decode by hand, checking both laws after every forward."""
    ids, mask = prompts(*lengths)
    with qevict.attach(model, policy) as session:
        cache = session.prefill(ids, mask)
        check_laws(cache)
        for step in steps:
            new = torch.randint(3, 97, (len(lengths), step))
            mask = torch.cat((mask, torch.ones_like(new)), dim=1)
            positions = mask.cumsum(1)[:, -step:] - 1
            with torch.no_grad():
                model(new, attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache})
            check_laws(cache)
    return cache


def check_laws(cache: Any) -> None:
    """Bytes told are bytes held, and no more than allowed."""
    report = cache.report()
    assert report.exact_bytes == reachable_bytes(cache) == sum(report.bytes_by_kind.values())
    wiring = cache.wiring
    if cache.policy.budget is None or min(report.tokens) < cache.policy.min_tokens:
        return
    allowed = 0
    floor = wiring.row_bytes + wiring.geometry.layers * wiring.lanes_per_row * wiring.reserve_bytes
    for tokens in report.tokens:
        allowed += max(
            cache.policy.budget.row_bytes(tokens, wiring.geometry.token_bytes * wiring.geometry.layers), floor
        )
    assert report.exact_bytes <= allowed
    assert report.overshoot_bytes == max(0, report.exact_bytes - report.budget_bytes)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_budget_and_byte_laws(data: st.DataObject) -> None:
    """Over lengths, budgets, windows, bits, periods, shares, granularity, dtypes and batch shapes."""
    bits = data.draw(st.sampled_from([2, 3, 4, 8]))
    window = data.draw(st.sampled_from([2, 4, 8, 16]))
    kind = data.draw(st.sampled_from(["qevict", "evict_only", "sinks_recent"]))
    budget = f"{data.draw(st.integers(1, 100))} %"
    common = {"sink_tokens": data.draw(st.integers(0, 6)), "recent_tokens": data.draw(st.sampled_from([0, 1, 8, 32]))}
    own: dict[str, Any] = {}
    if kind != "sinks_recent":
        own = {"window_tokens": window, "period_tokens": data.draw(st.integers(1, 12))}
    if kind == "qevict":
        own |= {"bits": bits, "quantized_share": data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))}
    policy = getattr(policies, kind)(budget, **common, **own, dtype=data.draw(st.sampled_from([None, torch.bfloat16])))
    policy = attrs.evolve(policy, granularity=data.draw(st.sampled_from(["row", "kv_head"])))
    lengths = tuple(data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3)))
    steps = data.draw(st.lists(st.sampled_from([1, 1, 1, 1, 3, 20]), max_size=14))
    feed(policy, lengths, steps)


def test_byte_law_without_pressure() -> None:
    """Also where nothing is given up, and pools only grow."""
    cache = feed(policies.full(), (90,), [1] * 40)
    assert cache.report().evictions == 0


def test_a_budget_of_tokens_or_bytes_stays_put() -> None:
    """Absolute budgets do not follow the length."""
    for budget in ("90 tokens", "48 KiB"):
        cache = feed(policies.evict_only(budget), (150,), [1] * 30)
        assert cache.report().overshoot_bytes == 0
        assert cache.report().evictions > 0


def test_rows_out_of_step() -> None:
    """Pads inside a later turn put the rows' events apart; the budget holds for both."""
    policy = policies.evict_only("60 tokens", period_tokens=32, window_tokens=2, recent_tokens=1, sink_tokens=0)
    ids, mask = prompts(200, 200)
    with qevict.attach(MODEL, policy) as session, torch.no_grad():
        cache = session.prefill(ids, mask)
        for width, pads in ((31, 30), *((1, 0),) * 40):
            new = torch.ones(2, width, dtype=torch.long)
            new[0, :pads] = 0
            mask = torch.cat((mask, new), 1)
            positions = (mask.cumsum(1) - 1)[:, -width:]
            MODEL(torch.full((2, width), 7), attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache})
            check_laws(cache)


def test_a_row_that_outgrows_min_tokens_is_compressed_at_once() -> None:
    """The budget holds from the first token beyond the threshold."""
    policy = attrs.evolve(policies.evict_only("60 tokens", period_tokens=32), min_tokens=210)
    cache = feed(policy, (200,), [], model=MODEL)
    with qevict.attach(MODEL, policy), torch.no_grad():
        for tokens in range(201, 230):
            MODEL(torch.full((1, 1), 7), **{CACHE_ARGUMENT: cache})
            assert (len(cache.kept_positions(0)[0]) == tokens) == (tokens < 210)


def test_below_min_tokens_nothing_is_encoded_either() -> None:
    """Also where the hottest tier holds codes."""
    whole = policies.qevict("50 %", quantized_share=1.0)
    policy = attrs.evolve(whole, tiers=whole.tiers[1:], router=policies.evict_only("50 %").router, min_tokens=170)
    cache = feed(policy, (150,), [1] * 19)
    assert cache.report().windows["int2"] == 0
    assert cache.kept_positions(0) == [[*range(169)]]
    assert forecast(cache.wiring, 169).windows["int2"] == 0
    assert feed(policy, (150,), [1] * 20).report().windows["int2"] > 0


def test_growth_slack_is_bounded_without_a_budget() -> None:
    """A full cache holds at most a sixteenth, one period and one window more than it must."""
    cache = feed(policies.full(), (400,), [1] * 20)
    report = cache.report()
    room = cache.wiring.geometry.layers * 3 * cache.wiring.block_bytes[0]
    assert (
        report.exact_bytes
        <= report.full_bytes * 17 / 16 + room + report.bytes_by_kind["tables"] + report.bytes_by_kind["scorer state"]
    )


def test_steps_of_a_growing_budget() -> None:
    """Budgets follow the length in steps of at most a sixty-fourth, never upwards."""
    for tokens in range(1, 5000):
        assert tokens * 63 / 64 <= stepped(tokens) <= tokens
