"""What a scorer is shown is what a plain computation over the stock cache gives."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import attrs
import pytest
import torch
from tests.oracle import held, prompts, tiny
from torch import Tensor
from transformers import DynamicCache

import qevict
from qevict import policies
from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.errors import UnsupportedOperationError
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy

LENGTHS = (9, 40)
SINKS, WINDOW, LAST = 2, 4, 6


@attrs.frozen
class Spy(Scorer):
    """Takes down what it is shown, and keeps the latest."""

    name: ClassVar[str] = "spy"
    needs: frozenset[Need] = frozenset()  # type: ignore[misc]  # a spy is asked for one thing at a time
    prompt_queries: int | None = LAST
    prompt_stride: int = 1
    observe_tokens: int | None = None
    repeats: Any = None
    seen: list[Any] = attrs.field(factory=list, eq=False)

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        return {}

    def update(self, state: State, observation: Observation) -> State:
        self.seen.append(observation)
        return state

    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        return {IMPORTANCE: windows.positions.float()}


def spying(spy: Spy, **options: Any) -> Policy:
    """A policy of small windows that shows something to a spy."""
    base = policies.evict_only("90 %", window_tokens=WINDOW, period_tokens=4, sink_tokens=SINKS, recent_tokens=4)
    chosen: dict[str, Any] = {"scorer": spy, "granularity": "kv_head"} | options
    return attrs.evolve(base, **chosen)


def shown(model: Any, spy: Spy, chunk: int | None = None, **options: Any) -> list[Any]:
    """What a padded prompt shows of each layer, in order."""
    with qevict.attach(model, spying(spy, **options)) as session:
        session.prefill(*prompts(*LENGTHS), chunk_tokens=chunk)
    return spy.seen


@torch.no_grad()
def stock(model: Any) -> tuple[Any, Any]:
    """The stock cache behind the same prompt, and the attention of each layer."""
    ids, mask = prompts(*LENGTHS)
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, position_ids=positions, output_attentions=True, **{CACHE_ARGUMENT: cache})
    return cache, out.attentions


def lanes(per_row: int, kv_heads: int = 2) -> Iterator[tuple[int, int, slice]]:
    """Each lane, its row, and its KV heads."""
    heads = kv_heads // per_row
    for lane in range(len(LENGTHS) * per_row):
        first = lane % per_row * heads
        yield lane, lane // per_row, slice(first, first + heads)


FAMILIES: dict[str, tuple[Callable[[], Any], int]] = {
    "llama": (lambda: tiny("llama", impl="eager", num_hidden_layers=2), 0),
    "gemma2": (lambda: tiny("gemma2", impl="eager"), 1),
    "gpt_oss": (lambda: tiny("gpt_oss", impl="eager"), 1),
}
"""Plain logits, capped ones, and ones that share their sum with a sink; and a layer of each that a policy rules."""


@pytest.mark.parametrize("granularity", ["row", "kv_head"])
@pytest.mark.parametrize("chunk", [None, 18, 39])
@pytest.mark.parametrize("family", FAMILIES)
def test_masses_by_query_are_the_softmax_of_the_last_queries(family: str, chunk: int | None, granularity: str) -> None:
    """Of each row, pads or not, in however many pieces; summed over the tokens of a window."""
    make, index = FAMILIES[family]
    model = make()
    spy = Spy(needs=frozenset({Need.MASS_BY_QUERY, Need.POSITIONS}))
    told = [each for each in shown(model, spy, chunk, granularity=granularity) if each.mass_by_query is not None]
    _, attention = stock(model)
    layers = 2 if family == "llama" else 1
    assert len(told) == layers
    found, weights = told[0], attention[index]
    assert found.ends_prompt
    assert found.asked is not None
    for lane, row, heads in lanes(found.lanes_per_row):
        length, pads = LENGTHS[row], max(LENGTHS) - LENGTHS[row]
        own = weights[row].unflatten(0, (2, 2))[heads].flatten(0, 1)
        counted = [position for position in found.asked[lane].tolist() if position >= 0]
        assert sorted(counted) == [*range(length - LAST, length)]
        for place, position in enumerate(found.asked[lane].tolist()):
            for column, first in enumerate(found.positions[lane].tolist()):
                if position < 0 or first < 0:
                    continue
                tokens = own[:, pads + position, pads + first : min(pads + first + WINDOW, pads + length)]
                mass = found.mass_by_query[lane, :, place, column]
                torch.testing.assert_close(mass, tokens.sum(1), atol=1e-5, rtol=0)


def test_columns_begin_at_the_positions_told() -> None:
    spy = Spy(needs=frozenset({Need.KEYS, Need.POSITIONS}))
    for found in shown(tiny(num_hidden_layers=1), spy):
        for lane, row, _ in lanes(found.lanes_per_row):
            pads = max(LENGTHS) - LENGTHS[row]
            for slot, column in enumerate(found.columns[lane].tolist()):
                position = slot - pads
                assert (column >= 0) == (position >= SINKS)
                if column >= 0:
                    first = SINKS + (position - SINKS) // WINDOW * WINDOW
                    assert int(found.positions[lane, column]) == first


@pytest.mark.parametrize("chunk", [None, 18])
def test_queries_are_the_rotated_ones_of_the_model(chunk: int | None) -> None:
    model, queries = tiny(num_hidden_layers=1, impl="eager"), []
    attention, apply = model.model.layers[0].self_attn, __import__("transformers").models.llama.modeling_llama
    handle = attention.q_proj.register_forward_hook(lambda _m, _i, out: queries.append(out.detach()))
    [found] = [each for each in shown(model, Spy(needs=frozenset({Need.QUERIES})), chunk) if each.queries is not None]
    handle.remove()
    plain = torch.cat(queries, dim=1).unflatten(-1, (4, 16)).transpose(1, 2)
    positions = (prompts(*LENGTHS)[1].cumsum(1) - 1).clamp(min=0)
    plain = apply.apply_rotary_pos_emb(plain, plain, *model.model.rotary_emb(plain, positions))[0]
    for lane, row, heads in lanes(found.lanes_per_row):
        own = plain[row].unflatten(0, (2, 2))[heads]
        for place, position in enumerate(found.asked[lane].tolist()):
            if position >= 0:
                slot = max(LENGTHS) - LENGTHS[row] + position
                torch.testing.assert_close(found.queries[lane, :, :, place], own[:, :, slot], atol=1e-5, rtol=0)


@pytest.mark.parametrize("granularity", ["row", "kv_head"])
def test_what_is_held_at_the_prompts_end_is_the_stock_cache(granularity: str) -> None:
    model = tiny(num_hidden_layers=2, impl="eager")
    spy = Spy(needs=frozenset({Need.PROMPT, Need.POSITIONS}))
    told = [each for each in shown(model, spy, 16, granularity=granularity) if each.held is not None]
    assert len(told) == 2
    cache, _ = stock(model)
    for layer, found in enumerate(told):
        for lane, row, heads in lanes(found.lanes_per_row):
            check_held(found, lane, [*range(LENGTHS[row])], cache.layers[layer], row, heads)


def check_held(found: Any, lane: int, positions: list[int], layer: Any, row: int, heads: slice) -> None:
    """Each position once, with the stock cache's key and value, in the column of its window."""
    pads = max(LENGTHS) - LENGTHS[row]
    slots = {position: slot for slot, position in enumerate(found.held.positions[lane].tolist()) if position >= 0}
    assert sorted(slots) == positions
    for position, slot in slots.items():
        for own, theirs in ((found.held.keys, layer.keys), (found.held.values, layer.values)):
            torch.testing.assert_close(own[lane, :, slot], theirs[row, heads, pads + position], atol=1e-5, rtol=0)
        column = int(found.held.columns[lane, slot])
        assert (column >= 0) == (position >= SINKS)
        assert int(found.held.rotary_positions[lane, slot]) == position
        if column >= 0:
            assert 0 <= position - int(found.positions[lane, column]) < WINDOW


@torch.no_grad()
def test_codes_are_shown_decoded_and_turned() -> None:
    """At each event; read by hand from the pools just before it."""
    model, ids = tiny(num_hidden_layers=1), prompts(60)[0]
    spy = Spy(needs=frozenset({Need.HELD}))
    base = policies.qevict("60 %", window_tokens=WINDOW, period_tokens=4, sink_tokens=SINKS, recent_tokens=4)
    with qevict.attach(model, attrs.evolve(base, scorer=spy)) as session:
        cache = session.prefill(ids)
        for step in range(3):
            model(ids[:, step : step + 1], **{CACHE_ARGUMENT: cache})
        by_hand, told = held(cache, model, 0), len(spy.seen)
        model(ids[:, 3:4], **{CACHE_ARGUMENT: cache})
        assert cache.report().windows["int2"] > 0
    [found] = spy.seen[told:]
    for slot, position in enumerate(found.held.positions[0].tolist()):
        if 0 <= position < 63:
            assert by_hand.keep[0, :, position].all()
            torch.testing.assert_close(found.held.keys[0, :, slot], by_hand.keys[0, :, position], atol=1e-5, rtol=0)
            torch.testing.assert_close(found.held.values[0, :, slot], by_hand.values[0, :, position], atol=1e-5, rtol=0)
    assert {position for position in found.held.positions[0].tolist() if position >= 0} == {
        *by_hand.keep[0, 0].nonzero()[:, 0].tolist(),
        63,
    }


@torch.no_grad()
def test_held_comes_with_events_and_the_prompt_alone_where_asked() -> None:
    model, ids = tiny(num_hidden_layers=1), prompts(30)[0]
    for need, wanted in ((Need.HELD, [30, 34, 38]), (Need.PROMPT, [30])):
        spy, lengths = Spy(needs=frozenset({need, Need.KEYS})), []
        with qevict.attach(model, spying(spy)) as session:
            cache = session.prefill(ids)
            for step in range(9):
                model(ids[:, step : step + 1], **{CACHE_ARGUMENT: cache})
        lengths = [30 + step for step, each in enumerate(spy.seen) if each.held is not None]
        assert lengths == wanted
        assert [each.ends_prompt for each in spy.seen] == [True] + [False] * 9


@pytest.mark.parametrize(("observed", "firsts"), [(None, [1, 5, 9]), (2, [3, 7])])
@torch.no_grad()
def test_first_looks_behind_an_event_are_told(observed: int | None, firsts: list[int]) -> None:
    """By row, since rows have their events apart."""
    model, (ids, mask) = tiny(num_hidden_layers=1), prompts(20, 30)
    spy = Spy(needs=frozenset({Need.MASS, Need.FIRST_LOOKS}), observe_tokens=observed)
    told = {}
    with qevict.attach(model, spying(spy, granularity="row")) as session:
        cache = session.prefill(ids, mask)
        assert spy.seen[-1].first is None
        for step in range(1, 10):
            mask = torch.cat((mask, mask.new_ones(2, 1)), dim=1)
            before = len(spy.seen)
            position = mask.sum(1, keepdim=True) - 1
            model(ids[:, -1:], attention_mask=mask, position_ids=position, **{CACHE_ARGUMENT: cache})
            for each in spy.seen[before:]:
                told[step] = each.first
    assert [step for step, first in told.items() if first is not None] == firsts
    assert all(first.all() for first in told.values() if first is not None)


def test_norms_are_those_of_values_through_the_slices_of_the_output_projection() -> None:
    model = tiny(num_hidden_layers=2, impl="eager")
    spy = Spy(needs=frozenset({Need.VALUES, Need.OUTPUT_PROJECTION}))
    cache, _ = stock(model)
    for layer, found in enumerate(shown(model, spy)):
        norms, weight = found.output.norms(found.values), model.model.layers[layer].self_attn.o_proj.weight.detach()
        for lane, row, heads in lanes(found.lanes_per_row):
            for query in range(2):
                head = heads.start * 2 + query
                through = cache.layers[layer].values[row, heads.start] @ weight[:, head * 16 : (head + 1) * 16].T
                real = slice(max(LENGTHS) - LENGTHS[row], None)
                torch.testing.assert_close(norms[lane, 0, query, real], through.abs().sum(1)[real], atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [[1, 0], [1], [1, 1, 0]])
@torch.no_grad()
def test_rows_turned_between_the_pieces_of_a_prompt(rows: list[int]) -> None:
    """The queries that wait for the prompt's end are turned with their rows."""
    model, (ids, mask) = tiny(num_hidden_layers=1), prompts(30, 40)

    def told(order: list[int]) -> Any:
        spy, now = Spy(needs=frozenset({Need.MASS_BY_QUERY}), prompt_queries=8), mask[order]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with qevict.attach(model, spying(spy)) as session:
            cache = session.cache()
            cache.expect(40)
            ask = {"attention_mask": mask[:, :36], "position_ids": positions[:, :36], CACHE_ARGUMENT: cache}
            model.base_model(ids[:, :36], **ask)
            assert cache.nbytes() == cache.report().exact_bytes
            cache.batch_select_indices(torch.tensor(order))
            ask = {"attention_mask": now, "position_ids": positions[order][:, 36:], CACHE_ARGUMENT: cache}
            model.base_model(ids[order][:, 36:], **ask)
        return spy.seen[-1]

    found, plain = told(rows), told([0, 1])
    lanes = [row * 2 + head for row in rows for head in range(2)]
    assert torch.equal(found.asked, plain.asked[lanes])
    torch.testing.assert_close(found.mass_by_query, plain.mass_by_query[lanes], atol=1e-6, rtol=0)


@torch.no_grad()
def test_tokens_taken_back_between_the_pieces_of_a_prompt_have_asked_nothing() -> None:
    model, ids = tiny(num_hidden_layers=1), prompts(40)[0]
    again = torch.cat((ids[:, :36], (ids[:, 34:36] + 7) % 90 + 3, ids[:, 36:]), dim=1)
    told = []
    for text, pieces in ((again, (36, 6)), (torch.cat((ids[:, :34], again[:, 36:]), dim=1), (34, 6))):
        spy = Spy(needs=frozenset({Need.MASS_BY_QUERY}), prompt_queries=8)
        with qevict.attach(model, spying(spy)) as session:
            cache = session.cache()
            cache.expect(40)
            for piece in text.split(pieces, dim=1):
                cache.crop(min(0, 34 - cache.get_seq_length()))
                model.base_model(piece, **{CACHE_ARGUMENT: cache})
        found = spy.seen[-1]
        order = [found.asked[0].tolist().index(position) for position in range(32, 40)]
        told.append((sorted(found.asked[0].tolist()), found.mass_by_query[:, :, order]))
    assert [position for position in told[0][0] if position >= 0] == [*range(32, 40)]
    torch.testing.assert_close(told[0][1], told[1][1], atol=1e-6, rtol=0)


@torch.no_grad()
def test_a_prompt_whose_queries_wait_is_not_saved(tmp_path: Any) -> None:
    model, ids = tiny(num_hidden_layers=1), prompts(40)[0]
    with qevict.attach(model, spying(Spy(needs=frozenset({Need.MASS_BY_QUERY})))) as session:
        cache = session.cache()
        cache.expect(40)
        model.base_model(ids[:, :36], **{CACHE_ARGUMENT: cache})
        with pytest.raises(UnsupportedOperationError, match="prompt"):
            cache.save(tmp_path / "cache.safetensors")
        model.base_model(ids[:, 36:], **{CACHE_ARGUMENT: cache})
    assert not [*tmp_path.iterdir()]
