"""Beam search: every region and tier of a cache follows the beams."""

from typing import Any

import attrs
import pytest
import torch
from tests.engine.test_moves import check_slots
from tests.oracle import assert_sensitive, before_forwards, held, play_again, prompts, tiny
from torch import Tensor
from transformers import GenerationConfig

import qevict
from qevict import errors, policies
from qevict.backends.flash import FlashAttention
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy
from qevict.testing.footprint import reachable_bytes, reachable_tensors

BEAMS: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 3, "do_sample": False}
SAMPLED = BEAMS | {"do_sample": True, "temperature": 1.3}
SCORED: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}

POLICIES = {
    "evict": policies.evict_only("85 %", recent_tokens=8),
    "int8": policies.qevict("85 %", bits=8, recent_tokens=8),
    "int2": policies.qevict("85 %", recent_tokens=8),
    "int8_per_head": attrs.evolve(policies.qevict("85 %", bits=8, recent_tokens=8), granularity="kv_head"),
}
POLICIES = {name: attrs.evolve(policy, backend=FlashAttention()) for name, policy in POLICIES.items()}
"""By a backend whose answers the bounds below were found with, whatever is installed."""


def small(impl: str = "sdpa") -> Any:
    """Two layers are enough to have several."""
    return tiny(impl=impl, num_hidden_layers=2)


@torch.no_grad()
def forced_scores(model: Any, policy: Policy, ids: Tensor, mask: Tensor, new: Tensor) -> Tensor:
    """Mean log-probability of answers that are fed to a cache of their own, token by token, without a reorder."""
    total, width = torch.zeros(len(new)), ids.shape[1]
    with qevict.attach(model, policy):
        cache = qevict.Cache(model, policy)
        mask = torch.cat((mask, torch.ones_like(new)), dim=1)
        for step, token in enumerate(new.unbind(1)):
            now = mask[:, : width + step]
            positions = (now.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = model(ids, attention_mask=now, position_ids=positions, **{CACHE_ARGUMENT: cache})
            total += out.logits[:, -1].log_softmax(-1).gather(1, token[:, None])[:, 0]
            ids = token[:, None]
    return total / new.shape[1]


def beams_of(out: Any) -> Tensor:
    """Which beam each token of each answer came from, counted within its prompt."""
    found: Tensor = out.beam_indices % BEAMS["num_beams"]
    return found


class TestC07BeamSearch:
    """Rows are independent, so a beam's score is that of its own tokens, whatever beam its past was computed in."""

    @pytest.mark.parametrize(("impl", "ask"), [("sdpa", BEAMS), ("eager", SAMPLED)], ids=["search", "sampling"])
    def test_one_dense_tier_is_the_dynamic_cache_bit_for_bit(self, impl: str, ask: dict[str, Any]) -> None:
        model, (ids, _) = small(impl), prompts(60, 60)
        assert_sensitive(model, ids, positions=(9, 30))
        torch.manual_seed(5)
        expected = model.generate(ids, max_new_tokens=60, **ask, **SCORED)
        torch.manual_seed(5)
        with qevict.attach(model, policies.full()) as session:
            found = session.generate(ids, max_new_tokens=60, **ask, **SCORED)
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.equal(found.sequences_scores, expected.sequences_scores)
        assert all(torch.equal(own, theirs) for own, theirs in zip(found.scores, expected.scores, strict=True))
        assert len(beams_of(found).unique()) > 2

    @pytest.mark.parametrize("name", ["evict", "int2", "int8_per_head"])
    def test_scores_are_those_of_the_answers_fed_alone(self, name: str) -> None:
        model, (ids, mask), policy = small(), prompts(23, 60), POLICIES[name]
        with qevict.attach(model, policy) as session:
            cache = session.cache()
            out = session.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=60, **BEAMS, **SCORED)
        report = cache.report()
        assert report.evictions
        assert all(report.windows.values())
        assert report.exact_bytes == reachable_bytes(cache)
        check_slots(cache)
        own = (ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0), out.sequences[:, 60:])
        torch.testing.assert_close(forced_scores(model, policy, *own), out.sequences_scores, atol=1e-4, rtol=0)

    @pytest.mark.parametrize(
        ("name", "impl", "ask"), [("int8", "eager", SAMPLED), ("int2", "sdpa", BEAMS)], ids=["int8", "int2"]
    )
    def test_equals_the_oracle(self, name: str, impl: str, ask: dict[str, Any]) -> None:
        model, (ids, mask), watch = small(impl), prompts(23, 60), []
        torch.manual_seed(5)
        with qevict.attach(model, POLICIES[name]) as session:
            cache = session.cache()

            def note(_number: int) -> None:
                watch.append({layer: held(cache, model, layer) for layer in range(len(cache.engine.layers))})

            with before_forwards(model, note):
                out = session.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=60, **ask, **SCORED)
        assert len(beams_of(out).unique()) > 2
        torch.manual_seed(5)
        expected = play_again(model, watch, ids, mask, max_new_tokens=60, **ask, **SCORED)
        assert torch.equal(out.sequences, expected.sequences)
        for own, theirs in zip(out.scores, expected.scores, strict=True):
            torch.testing.assert_close(own, theirs, atol=2e-4, rtol=0)

    @pytest.mark.parametrize("ask", [BEAMS, {"num_return_sequences": 3, "do_sample": True}], ids=["search", "sampling"])
    def test_a_filled_cache_is_repeated_for_the_beams(self, ask: dict[str, Any]) -> None:
        model, (ids, mask) = small(), prompts(23, 60)
        torch.manual_seed(5)
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, **ask)
        with qevict.attach(model, policies.full()) as session:
            cache = session.prefill(ids[:, :50], mask[:, :50])
            torch.manual_seed(5)
            found = session.generate(ids[:, 50:], cache=cache, max_new_tokens=12, **ask)
        assert torch.equal(found[:, 10:], expected[:, 60:])

    def test_a_generation_config_asks_for_beams_too(self) -> None:
        model, (ids, _) = small(), prompts(60)
        config = GenerationConfig(num_beams=3, max_new_tokens=4, eos_token_id=None, pad_token_id=0)
        with qevict.attach(model, policies.full()) as session:
            cache = session.prefill(ids[:, :50])
            session.generate(ids[:, 50:], cache=cache, generation_config=config)
        assert len(cache.report().tokens) == 3


@torch.no_grad()
def step(model: Any, cache: Any, new: Tensor, mask: Tensor) -> Any:
    """One forward; its logits."""
    return model(new, attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits


def after_an_event(model: Any, policy: Policy) -> tuple[Any, Tensor, Tensor]:
    """A cache of three rows at whose last forward windows moved; its mask, and tokens to go on with.

    Without position ids, rotary positions count the pads, so that each row has an offset of its own.
    """
    ids, mask = prompts(23, 40, 60)
    with qevict.attach(model, policy):
        cache = qevict.Cache(model, policy)
        step(model, cache, ids, mask)
        before = cache.report()
        for token in ids[:, -8:].unbind(1):
            mask = torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), dim=1)
            step(model, cache, token[:, None], mask)
        assert cache.report().evictions > before.evictions
        assert all(cache.report().windows.values())
    return cache, torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), dim=1), ids[:, :1] + 3


class TestC07RowsFollow:
    """Each row of a cache is what it was, wherever it stands and however often."""

    @pytest.mark.parametrize("name", POLICIES)
    @pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 0, 2, 1], [2]], ids=["turned", "repeated", "one"])
    def test_everything_follows_right_after_an_event(self, name: str, rows: list[int]) -> None:
        model = small()
        cache, mask, new = after_an_event(model, POLICIES[name])
        other, index = cache.fork(), torch.tensor(rows)
        other.reorder_cache(index)
        check_slots(other)
        assert other.nbytes() == reachable_bytes(other)
        assert torch.equal(other.engine.clock.offset, cache.engine.clock.offset[index])
        assert len(cache.engine.clock.offset.unique()) == 3
        for layer in range(2):
            ours, theirs = held(other, model, layer), held(cache, model, layer)
            for name_of in ("keep", "keys", "values"):
                assert torch.equal(getattr(ours, name_of), getattr(theirs, name_of)[index])
            per_row = cache.wiring.lanes_per_row
            lanes = [row * per_row + lane for row in rows for lane in range(per_row)]
            lines, old = lines_of(other, layer), lines_of(cache, layer)
            assert lines == [old[lane] for lane in lanes]
        with qevict.attach(model, POLICIES[name]):
            for _ in range(9):
                found, expected = step(model, other, new[index], mask[index]), step(model, cache, new, mask)
                torch.testing.assert_close(found, expected[index], atol=1e-5, rtol=0)
                mask = torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), dim=1)
        assert other.kept_positions(0) == [cache.kept_positions(0)[lane] for lane in lanes]
        assert other.nbytes() == reachable_bytes(other)

    def test_repeating_and_selecting(self) -> None:
        cache, _, _ = after_an_event(small(), POLICIES["int8"])
        twice, picked = cache.fork(), cache.fork()
        twice.batch_repeat_interleave(2)
        picked.batch_select_indices(torch.tensor([2, 0], dtype=torch.int32))
        assert twice.report().tokens == (31, 31, 48, 48, 68, 68)
        assert picked.report().tokens == (68, 31)
        for cache_of, rows in ((twice, [0, 0, 1, 1, 2, 2]), (picked, [2, 0])):
            assert lines_of(cache_of, 1) == [lines_of(cache, 1)[row] for row in rows]

    def test_rows_that_are_put_in_order_in_inference_mode_go_on_without_it(self) -> None:
        model = small()
        cache, mask, new = after_an_event(model, POLICIES["int8"])
        plain = cache.fork()
        with torch.inference_mode():
            cache.reorder_cache(torch.tensor([2, 0, 1]))
        plain.reorder_cache(torch.tensor([2, 0, 1]))
        turned = new[[2, 0, 1]], mask[[2, 0, 1]]
        with qevict.attach(model, POLICIES["int8"]):
            assert torch.equal(step(model, cache, *turned), step(model, plain, *turned))

    def test_rows_as_they_are_cost_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache, _, _ = after_an_event(small(), POLICIES["int8"])
        held_before = [id(tensor) for tensor in reachable_tensors(cache)]
        cache.reorder_cache(torch.arange(3))
        cache.batch_repeat_interleave(1)
        assert [id(tensor) for tensor in reachable_tensors(cache)] == held_before

    def test_an_empty_cache_has_no_rows_to_move(self) -> None:
        model = small()
        with qevict.attach(model, policies.full()) as session:
            cache = session.cache()
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(4)
        assert not cache.get_seq_length()

    @pytest.mark.parametrize(
        "rows",
        [[0, 3], [-1], [], [[0]], [0.0], [True, False, True]],
        ids=["beyond", "negative", "none", "axes", "float", "bool"],
    )
    def test_what_are_no_rows(self, rows: Any) -> None:
        cache, _, _ = after_an_event(small(), POLICIES["evict"])
        before = cache.nbytes()
        for method in (cache.reorder_cache, cache.batch_select_indices):
            with pytest.raises(errors.InputError, match="rows"):
                method(torch.tensor(rows))
        assert cache.nbytes() == before

    @pytest.mark.usefixtures("unchecked")
    def test_what_is_no_tensor_and_no_number(self) -> None:
        cache, _, _ = after_an_event(small(), POLICIES["evict"])
        wrong: Any
        for wrong in ([0, 1], None):
            with pytest.raises(errors.InputError, match="whole numbers in a tensor"):
                cache.reorder_cache(wrong)
        for wrong in (0, -2, 1.5, True):
            with pytest.raises(errors.InputError, match="1 or more"):
                cache.batch_repeat_interleave(wrong)


def lines_of(cache: Any, index: int) -> list[list[tuple[Any, ...]]]:
    """What the table knows of each window, lane by lane, slots but for whether there is one."""
    layer = cache.engine.layers[index]
    records = layer.records
    columns = [records.window, records.place, records.moves, *(records.slots >= 0).unbind(1), *records.state.values()]
    lanes: list[list[tuple[Any, ...]]] = [[] for _ in range(layer.lanes)]
    for lane, *line in zip(records.lane_of().tolist(), *(column.tolist() for column in columns), strict=True):
        lanes[lane].append(tuple(line))
    return lanes
