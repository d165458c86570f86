"""The parts of the measurements: what they compute is right; how long anything takes is not tested."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from benchmarks.attending import attender, copies_beyond
from benchmarks.contestants import (
    PACKED,
    STOCK,
    Contestant,
    arena,
    by_policy,
    cheap_to_fill,
    filled,
    holding,
    not_measured,
    plans,
    stock_field,
)
from benchmarks.decoding import decoder
from benchmarks.lines import Line, break_even, fit
from benchmarks.naive import NaiveRebuild
from benchmarks.record import rounded, write
from benchmarks.scoring import NONE, scorings
from benchmarks.stages import STAGES, operator_shares, shares, stage_seconds
from benchmarks.synthetic import context
from tests.oracle import prompts, tiny

from benchmarks import packed
from qevict import policies
from qevict.backends.reference import ReferenceAttention
from qevict.bench.speed import next_tokens, pace, paces, take_turns
from qevict.hf.compat import CACHE_ARGUMENT

MODEL = tiny("llama")
QEVICT = policies.qevict("40 %")
FIELD = stock_field() | {"QEvict": by_policy(QEVICT), "full": by_policy(policies.full())}


def test_ratios_are_paired_by_round() -> None:
    """A machine that is twice as slow in one round changes nothing."""
    found = pace([3.0, 6.0, 3.3], [1.0, 2.0, 1.0])
    assert found.ratio == pytest.approx(3.0)
    assert found.low == pytest.approx(3.0)
    assert found.high == pytest.approx(3.15)
    assert found.p95 == pytest.approx(3.27)
    assert found.least == pytest.approx(3.0)
    assert paces([{"one": 2.0, "two": 4.0}], "two")["one"].ratio == 0.5


def test_turns_change_who_is_first_and_are_announced() -> None:
    played: list[str] = []
    runners: dict[str, Callable[[], object]] = {name: lambda name=name: played.append(name) for name in "abc"}  # type: ignore[misc]
    rounds = [take_turns(runners, turn, lambda name: played.append(f"before {name}")) for turn in range(2)]
    assert played == [f"{word}{name}" for name in "abcbca" for word in ("before ", "")]
    assert [list(each) for each in rounds] == [list("abc")] * 2


def test_a_line_is_found_through_its_points() -> None:
    found = fit([1, 2, 4], [3.0, 5.0, 9.0])
    assert found.start == pytest.approx(1.0)
    assert found.slope == pytest.approx(2.0)
    assert found.residual == pytest.approx(0.0)
    assert found.at(10) == pytest.approx(21.0)
    with pytest.raises(ValueError, match="two or more lengths"):
        fit([2, 2], [1.0, 2.0])


@pytest.mark.parametrize(
    ("own", "expected"),
    [((2.0, 0.1), 10.0), ((0.5, 0.1), 0.0), ((2.0, 0.2), None), ((2.0, 0.3), None), ((0.5, 0.2), 0.0)],
)
def test_lines_cross_where_ours_becomes_the_lower_one(own: tuple[float, float], expected: float | None) -> None:
    found = break_even(Line(*own, residual=0.0), Line(1.0, 0.2, residual=0.0))
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("lengths", [(70,), (70, 40)])
def test_the_packed_cache_gives_the_models_own_logits(lengths: tuple[int, ...]) -> None:
    """Over prompt and single tokens, with and without pads, and over a buffer that is laid out anew."""
    ids, mask = prompts(*lengths)
    with arena(MODEL, FIELD) as switch:
        found = {}
        for name, cache in ((STOCK, FIELD[STOCK].make(MODEL)), (PACKED, packed.packed_cache(MODEL, room_tokens=2))):
            switch(name)
            found[name] = torch.stack(_logits(cache, ids, mask if len(lengths) > 1 else None))
    torch.testing.assert_close(found[PACKED], found[STOCK], rtol=1e-5, atol=1e-5)


def _logits(cache: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    logits, new = [], ids
    for step in range(12):
        given = {} if mask is None else {"attention_mask": mask, "position_ids": _positions(mask, new)}
        logits.append(MODEL(new, use_cache=True, **given, **{CACHE_ARGUMENT: cache}).logits[:, -1])
        new = torch.full((ids.shape[0], 1), 5 + step)
        mask = None if mask is None else torch.cat((mask, torch.ones_like(new)), dim=1)
    return logits


def _positions(mask: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]


def test_the_naive_rebuild_reads_and_scores_as_the_reference_does() -> None:
    recording, texts, kept = context(MODEL, [150, 90]), [], []
    for backend in (ReferenceAttention(), NaiveRebuild()):
        field = {"own": by_policy(attrs.evolve(QEVICT, backend=backend))}
        with arena(MODEL, field) as switch:
            cache = filled(MODEL, field, recording, switch)["own"]
            mask = (torch.arange(151) >= torch.tensor([[0], [60]])).long()
            positions = torch.tensor([[150], [90]])
            given = {"attention_mask": mask, "position_ids": positions, CACHE_ARGUMENT: cache}
            texts.append(MODEL(torch.full((2, 1), 7), use_cache=True, **given).logits)
            kept.append([layer.records.state["mass"] for layer in cache.engine.layers])
    torch.testing.assert_close(*texts, rtol=1e-4, atol=1e-4)
    for one, other in zip(*kept, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [[190], [190, 150]])
def test_every_cache_takes_a_synthetic_context_and_goes_on(lengths: list[int]) -> None:
    with arena(MODEL, FIELD) as switch:
        caches = filled(MODEL, FIELD, context(MODEL, lengths), switch)
        held = {name: holding(cache, FIELD[name], MODEL) for name, cache in caches.items()}
        for name, cache in caches.items():
            switch(name)
            decoder(MODEL, cache, lengths)()
            assert cache.get_seq_length() == max(lengths) + 8
    assert caches["QEvict"].report().tokens == tuple(length + 8 for length in lengths)
    assert held["full"].tokens_attended == tuple(map(float, lengths))
    assert held[STOCK].tokens_attended == (float(max(lengths)),) * len(lengths)
    assert held[STOCK].exact_bytes == held[STOCK].full_bytes < held[PACKED].exact_bytes
    assert max(held["QEvict"].tokens_attended) < 190
    assert held["QEvict"].exact_bytes <= 0.4 * held["QEvict"].full_bytes


def test_a_synthetic_context_is_the_same_for_everyone_and_for_every_cache() -> None:
    """A stock cache and the full policy's hold the same keys, so they say the same next."""
    one, other = (context(MODEL, [40]).incoming for _ in range(2))
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0].keys, one[1].keys)
    new = torch.full((1, 1), 7)
    with arena(MODEL, FIELD) as switch:
        caches, said = filled(MODEL, FIELD, context(MODEL, [40]), switch), []
        for name in (STOCK, PACKED, "full"):
            switch(name)
            said.append(MODEL(new, use_cache=True, **{CACHE_ARGUMENT: caches[name]}).logits)
    for each in said[1:]:
        torch.testing.assert_close(each, said[0], rtol=1e-4, atol=1e-4)


def test_the_arena_leaves_the_model_as_it_was() -> None:
    before = MODEL.config._attn_implementation
    with arena(MODEL, FIELD) as switch:
        switch(PACKED)
    assert MODEL.config._attn_implementation == before


def test_attention_alone_grows_every_copy() -> None:
    with arena(MODEL, FIELD) as switch:
        for name, cache in filled(MODEL, FIELD, context(MODEL, [60]), switch).items():
            switch(name)
            attender(MODEL, cache, 60, copies=2)()
            assert cache.get_seq_length() == 68
    assert copies_beyond(10, 25) == 3
    assert copies_beyond(100, 25) == 1


def test_stages_are_methods_of_the_engine_and_shares_add_up() -> None:
    """A renamed method fails here, not in a long run; and the watch is taken off again."""
    before = {stage: getattr(*where) for stage, where in STAGES.items()}
    field: dict[str, Contestant] = {"QEvict": FIELD["QEvict"]}
    with arena(MODEL, field) as switch:
        cache = filled(MODEL, field, context(MODEL, [90]), switch)["QEvict"]
        run = decoder(MODEL, cache, [90])
        found = shares(stage_seconds(run))
        assert sum(found.values()) == pytest.approx(1.0)
        assert all(found[stage] > 0 for stage in STAGES)
        assert sum(operator_shares(run, most=10**6).values()) == pytest.approx(1.0)
    assert {stage: getattr(*where) for stage, where in STAGES.items()} == before


def test_contestants_are_told_apart_by_what_they_store_and_how_they_are_read() -> None:
    found = plans("20 %", torch.float32)
    assert {policy.dtype for policy in found.values()} == {torch.float32, torch.bfloat16}
    assert len(set(found.values())) == len(found)
    assert {policy.dtype for policy in plans("20 %", torch.bfloat16).values()} == {torch.bfloat16}
    cheap = cheap_to_fill(QEVICT)
    assert cheap.scorer.prompt_queries == 32
    assert attrs.evolve(cheap, scorer=QEVICT.scorer) == QEVICT
    assert cheap_to_fill(policies.full()) == policies.full()


def test_scorings_differ_in_nothing_but_the_scorer() -> None:
    found = scorings("20 %")
    assert not found[NONE].scorer.needs
    assert len({attrs.evolve(policy, scorer=QEVICT.scorer) for policy in found.values()}) == 1


def test_a_missing_competitor_has_a_reason() -> None:
    assert all(not_measured().values())


def test_records_are_rounded_and_written(tmp_path: Any) -> None:
    assert rounded({"a": 1.23456789, "b": (2, 0.000123456), "c": "x"}) == {"a": 1.235, "b": [2, 0.0001235], "c": "x"}
    assert write("one", {"a": 1.0}, tmp_path).read_text("utf-8") == '{\n "a": 1.0\n}\n'


def test_the_next_token_is_the_likeliest() -> None:
    ids = prompts(20)[0]
    with torch.no_grad():
        expected = MODEL(ids).logits[:, -1:].argmax(-1)
    assert torch.equal(next_tokens(MODEL, FIELD[STOCK].make(MODEL), ids), expected)
