"""Layers stacked up are routed as each would be alone."""

import weakref

import attrs
import torch
from tests.oracle import prompts, tiny

import qevict
from qevict import policies
from qevict.engine import records as table
from qevict.engine.stack import Stack
from qevict.hf.compat import CACHE_ARGUMENT

MODEL = tiny()


def cache_of(*lengths: int, steps: int = 0) -> object:
    ids, mask = prompts(*lengths)
    with qevict.attach(MODEL, policies.qevict("40 %")) as session:
        cache = session.prefill(ids, mask)
        for _ in range(steps):
            mask = torch.cat((mask, mask[:, :1] * 0 + 1), dim=1)
            positions = mask.sum(1, keepdim=True) - 1
            with torch.no_grad():
                MODEL(mask[:, -1:] + 4, attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache})
    return cache


def test_joined_tables_part_into_what_they_were() -> None:
    """Ragged lanes in every layer; what is read later is read from views of the one table."""
    tables = [layer.records for layer in cache_of(300, 90, 170).engine.layers]  # type: ignore[attr-defined]
    joined = table.joined(tables)
    parts = [
        attrs.evolve(part, starts=part.starts - part.first_line, base=part.base - part.first_line, first_line=0)
        for part in table.parted(joined, len(tables))
    ]
    for own, part in zip(tables, parts, strict=True):
        for field in attrs.fields(table.Records):
            left, right = getattr(own, field.name), getattr(part, field.name)
            if isinstance(left, torch.Tensor):
                assert torch.equal(left, right), field.name
            elif field.name == "state":
                assert all(torch.equal(column, right[name]) for name, column in left.items())
            else:
                assert left == right, field.name
        assert part.window.untyped_storage().data_ptr() == joined.window.untyped_storage().data_ptr()


def test_free_slots_lie_in_the_region_of_their_lane_and_layer() -> None:
    cache = cache_of(300, 90, steps=9)
    layers = cache.engine.layers  # type: ignore[attr-defined]
    stack = Stack.of(layers)
    for segment in range(2):
        lanes = [
            lane
            for lane, (region, live) in enumerate(zip(stack.regions[segment], stack.live[segment], strict=True))
            for _ in range(region - live)
        ]
        slots = stack.free_slots(segment, torch.tensor(lanes, dtype=torch.int64)).tolist()
        for index, layer in enumerate(layers):
            own = [slot for slot, lane in zip(slots, lanes, strict=True) if lane // layer.lanes == index]
            taken = layer.records.slots[:, segment]
            assert sorted(own + taken[taken >= 0].tolist()) == list(range(layer.pools[segment].capacity))


def test_what_is_hidden_is_free_or_not_yet_written() -> None:
    cache = cache_of(300, 90, steps=13)
    for layer in cache.engine.layers:  # type: ignore[attr-defined]
        lanes = layer.records.lane_of().tolist()
        shown = torch.zeros_like(layer.hidden[0])
        for lane, window, slot in zip(
            lanes, layer.records.window.tolist(), layer.records.slots[:, 0].tolist(), strict=True
        ):
            if slot >= 0:
                left = cache.engine.clock.tokens[lane] - 5 - 8 * window  # type: ignore[attr-defined]
                shown[slot, : max(0, left)] = True
        assert torch.equal(layer.hidden[0], ~shown)
        own = layer.records.slots[:, 1][layer.records.place == 1].long()
        assert int((~layer.hidden[1]).sum()) == len(own)
        assert not layer.hidden[1][own].any()


def test_a_pool_that_is_laid_out_anew_lets_go_of_the_old_one() -> None:
    """At once: an event that waited for all layers would hold every pool twice."""
    cache = cache_of(300, steps=3)
    for layer in cache.engine.layers:  # type: ignore[attr-defined]
        assert layer.lent is not None
        old = [weakref.ref(array) for array in layer.pools[0].lend().values()]
        layer.repack(0, [own + 1 for own in layer.regions[0]])
        assert [array() for array in old] == [None] * len(old)
