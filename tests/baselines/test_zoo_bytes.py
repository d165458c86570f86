"""Every preset holds the bytes that it reports, and no more than its budget where it can."""

import pytest

import qevict
from qevict.testing.footprint import reachable_bytes
from tests.baselines.zoo import EVICTING, NAMES, NEW, Zoo, batch_of, model_of, policy_of, run
from tests.oracle import prompts

LENGTH = 150


@pytest.mark.parametrize("name", NAMES)
def test_bytes_told_are_bytes_of_storages_at_every_step(name: str) -> None:
    batch = batch_of(name)
    assert [report.exact_bytes for report in batch.reported] == batch.stored
    for report in batch.reported:
        assert report.budget_bytes is not None
        assert report.overshoot_bytes == max(0, report.exact_bytes - report.budget_bytes)
        assert sum(report.bytes_by_kind.values()) == report.exact_bytes


@pytest.mark.parametrize("name", NAMES)
def test_the_budget_holds(name: str) -> None:
    """At the prompt's end, and behind every step for what is routed by period."""
    found = one_of(name)
    within = found.reported if found.cache.policy.route_at == "period" else found.reported[:1]
    for report in within:
        assert report.overshoot_bytes == 0
    least = within[0].budget_bytes * (0.85 if name in EVICTING else 0.7)
    assert within[0].exact_bytes > least, "hardly any of the budget is used"


def one_of(name: str) -> Zoo:
    """One row that is long enough for the budget to hold what is protected."""
    return run(policy_of(name), model_of(), prompts(LENGTH)[0])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_compressed_once_grows_by_what_is_decoded(name: str) -> None:
    """And nothing else happens to it; what is routed by period gives up more."""
    batch, once = batch_of(name), batch_of(name).cache.policy.route_at == "prompt"
    behind = [batch.cache.kept_positions(layer) for layer in range(2)]
    for before, after in zip(batch.kept, behind, strict=True):
        for lane, (own, later) in enumerate(zip(before, after, strict=True)):
            row = lane // batch.cache.wiring.lanes_per_row
            grown = own + [int(batch.mask[row].sum()) + step for step in range(NEW)]
            assert later == grown if once else {*later} <= {*grown}
    evicted = [report.evictions for report in (batch.reported[0], batch.reported[-1])]
    assert (evicted[0] == evicted[1]) == once


@pytest.mark.parametrize("name", ["snapkv", "adakv"])
def test_the_overshoot_of_what_is_compressed_once_is_named(name: str) -> None:
    """With a budget that does not grow with the text."""
    found = run(policy_of(name, "60 tokens"), model_of(), prompts(LENGTH)[0], new=9)
    assert found.reported[0].overshoot_bytes == 0
    last = found.reported[-1]
    assert last.overshoot_bytes == last.exact_bytes - last.budget_bytes > 0
    period = run(policy_of(name, "60 tokens", route_at="period"), model_of(), prompts(LENGTH)[0], new=9)
    assert not any(report.overshoot_bytes for report in period.reported)


@pytest.mark.parametrize("name", ["adakv", "defensivekv", "kvzip"])
def test_ragged_lanes_free_what_they_evict(name: str) -> None:
    """Storages are as small as if every lane held the mean."""
    with qevict.attach(model_of(), policy_of(name)) as session:
        ragged = session.prefill(prompts(LENGTH)[0])
    with qevict.attach(model_of(), policy_of("snapkv")) as session:
        even = session.prefill(prompts(LENGTH)[0])
    counts = [len(lane) for layer in range(2) for lane in ragged.kept_positions(layer)]
    assert len(set(counts)) > 1, counts
    pools = [layer.pools[0] for layer in ragged.engine.layers]
    room = ragged.policy.period_tokens - ragged.policy.sink_tokens  # until the next event; sinks lie elsewhere
    assert sum(pool.capacity for pool in pools) == sum(counts) + len(counts) * room
    dense = [array for pool in pools for array in pool.lend().values()]
    assert abs(reachable_bytes(ragged) - reachable_bytes(even)) < 0.1 * reachable_bytes(even)
    assert all(array.untyped_storage().nbytes() == array.nbytes for array in dense)
