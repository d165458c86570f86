"""A real cache and its plain model side by side: fed alike, and compared in all that the cache holds and says."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from qevict.hf.compat import CACHE_ARGUMENT
from qevict.testing.footprint import reachable_bytes
from tests.plain import Plain
from tests.plain_rows import UNRANKED, Held, Row, Rules
from tests.plain_scorers import Shuffled, shuffled, turning


@attrs.frozen(eq=False)
class Spy:
    """What the attention of each layer was given and gave in one forward: queries, keys, values, output."""

    queries: list[Tensor] = attrs.field(factory=list)
    keys: list[Tensor] = attrs.field(factory=list)
    values: list[Tensor] = attrs.field(factory=list)
    outputs: list[Tensor] = attrs.field(factory=list)


@contextmanager
def spying(model: Any) -> Iterator[Spy]:
    """Look at a model's projections, without the cache."""
    spy, hooks = Spy(), []

    def before(module: Any, _args: Any, given: dict[str, Any]) -> None:
        hidden = given["hidden_states"]
        shape = (*hidden.shape[:2], -1, module.head_dim)
        query, key, value = (
            project(hidden).view(shape).transpose(1, 2) for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *given["position_embeddings"])
        for into, tensor in ((spy.queries, query), (spy.keys, key), (spy.values, value)):
            into.append(tensor)

    def after(_module: Any, args: tuple[Tensor, ...]) -> None:
        spy.outputs.append(args[0].detach().clone())

    for layer in model.model.layers:
        hooks += [
            layer.self_attn.register_forward_pre_hook(before, with_kwargs=True),
            layer.self_attn.o_proj.register_forward_pre_hook(after),
        ]
    try:
        yield spy
    finally:
        for hook in hooks:
            hook.remove()


def rules_of(cache: Any) -> Rules:
    """A policy as numbers; prices and budgets are those of the wiring."""
    policy, wiring = cache.policy, cache.wiring
    heads = range(wiring.geometry.kv_heads)
    return Rules(
        window=policy.window_tokens,
        period=policy.period_tokens,
        sinks=policy.sink_tokens,
        recent=max(policy.recent_tokens, 1),
        least=policy.min_tokens,
        heads=tuple(slice(head, head + 1) for head in heads)
        if policy.granularity == "kv_head"
        else (slice(0, len(heads)),),
        shares=policy.router.shares,
        bits=tuple(None if tier.keys is None else tier.keys.bits for tier in policy.tiers),
        prices=wiring.tier_bytes,
        capacity=lambda tokens, layer: wiring.capacity(wiring.lane_budgets(tokens)[layer]),
        score=shuffled if isinstance(policy.scorer, Shuffled) else turning,
        remembers=not isinstance(policy.scorer, Shuffled),
        rotary=wiring.rotary,
    )


@attrs.define(eq=False)
class Twin:
    """A cache and what it must hold.

    Attributes:
        cache: the real one.
        plain: the model of it.
        told: position ids are given, so that rows may have pads behind the prompt too.
        coming: what is still to be read of the prompt, tokens and flags by row.
    """

    cache: Any
    plain: Plain
    told: bool = True
    coming: list[tuple[list[int], list[bool]]] = attrs.field(factory=list)

    def copy(self, cache: Any) -> "Twin":
        return Twin(cache, self.plain.copy(), self.told, list(self.coming))

    def select(self, rows: Sequence[int]) -> None:
        """What the plain model makes of another choice of rows; where there are none yet, there is nothing to do."""
        if not self.plain.rows:
            return
        self.plain.select(rows)
        self.coming = [self.coming[row] for row in rows] if self.coming else []

    @torch.no_grad()
    def feed(self, model: Any, ids: Sequence[Sequence[int]], valid: Sequence[Sequence[bool]]) -> Tensor:
        """One forward over both; the attention of each layer must be that over what the plain model holds."""
        plain, geometry = self.plain, self.cache.wiring.geometry
        if not plain.rows:
            plain.open(len(ids), geometry.layers, geometry.kv_heads, geometry.head_dim)
        mask = torch.tensor([[*row.slots, *own] for row, own in zip(plain.rows, valid, strict=True)]).long()
        width = len(ids[0])
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:] if self.told else None
        if not plain.prompted:
            self._note_offsets(valid)
        with spying(model) as spy:
            given = {"attention_mask": mask, "position_ids": positions, CACHE_ARGUMENT: self.cache}
            logits: Tensor = model(torch.tensor(ids), **given).logits
        real = torch.tensor(valid)
        for layer, (query, keys, values) in enumerate(zip(spy.queries, spy.keys, spy.values, strict=True)):
            wanted = plain.attend(layer, query, keys, values, valid).flatten(2)[real]
            torch.testing.assert_close(spy.outputs[layer][real], wanted, rtol=1e-3, atol=1e-4)
        plain.take(spy.keys, spy.values, valid)
        return logits

    def check_same_future(self, other: "Twin", model: Any) -> None:
        """The next token finds the same in both, bit for bit; forks of them are asked, so that nothing changes."""
        rows = len(self.plain.rows)
        if rows:
            asked = [each.copy(each.cache.fork()) for each in (self, other)]
            answers = [each.feed(model, [[5]] * rows, [[True]] * rows) for each in asked]
            assert torch.equal(*answers)
            assert asked[0].cache.report() == asked[1].cache.report()

    def _note_offsets(self, valid: Sequence[Sequence[bool]]) -> None:
        """Without position ids the model counts pads."""
        for row, own in zip(self.plain.rows, valid, strict=True):
            if not self.told and not row.tokens:
                row.offset = len(row.slots) + own.count(False)

    def check(self) -> None:
        """All that the cache holds and says."""
        plain, cache = self.plain, self.cache
        assert type(cache.get_seq_length()) is int
        assert cache.get_seq_length() == plain.seen
        report = cache.report()
        assert cache.nbytes() == reachable_bytes(cache) == report.exact_bytes == sum(report.bytes_by_kind.values())
        assert list(report.tokens) == [row.tokens for row in plain.rows]
        assert (report.promotions, report.demotions, report.evictions) == (
            plain.promotions,
            plain.demotions,
            plain.evictions,
        )
        if plain.prompted:
            self._check_budget(report.exact_bytes)
        for index, layer in enumerate(cache.engine.layers):
            lanes = [(row, lane) for row in plain.rows for lane in range(len(plain.rules.heads))]
            assert cache.kept_positions(index) == [plain.kept(row, index, lane) for row, lane in lanes]
            _check_sinks(layer, plain, index, lanes)
            _check_windows(layer, plain, index, lanes)

    def _check_budget(self, held: int) -> None:
        """As the budget law says: per row, and never below what is always protected."""
        policy, wiring = self.cache.policy, self.cache.wiring
        if policy.budget is None or min(row.tokens for row in self.plain.rows) < policy.min_tokens:
            return
        geometry = wiring.geometry
        floor = wiring.row_bytes + geometry.layers * wiring.lanes_per_row * wiring.reserve_bytes
        full = geometry.token_bytes * geometry.layers
        assert held <= sum(max(policy.budget.row_bytes(row.tokens, full), floor) for row in self.plain.rows)


Lanes = Sequence[tuple[Row, int]]


def _check_sinks(layer: Any, plain: Plain, index: int, lanes: Lanes) -> None:
    for at, (row, lane) in enumerate(lanes):
        heads, held = plain.rules.heads[lane], slice(0, min(plain.rules.sinks, row.tokens))
        assert torch.equal(layer.sink_keys[at][:, held], row.keys[index][heads, held])
        assert torch.equal(layer.sink_values[at][:, held], row.values[index][heads, held])


def _check_windows(layer: Any, plain: Plain, index: int, lanes: Lanes) -> None:
    """Every line of the table, and what it owns in every pool, is what the plain model says."""
    records = layer.records
    first = len(plain.rules.bits) - sum(bits is not None for bits in plain.rules.bits)
    table = zip(
        records.lane_of().tolist(),
        *(column.tolist() for column in (records.window, records.place, records.moves, records.slots)),
        strict=True,
    )
    stored: dict[tuple[int, int], list[tuple[int, Held]]] = {}
    for at, window, place, moves, slots in table:
        row, lane = lanes[at]
        owned = row.lanes[index][lane].get(window)
        written = row.tokens - plain.rules.span(window).start
        if owned is None:
            assert window >= row.ranked, f"window {window} of lane {at} was evicted"
            assert (place, moves, [slot >= 0 for slot in slots[1:]]) == (UNRANKED, 0, [False] * len(slots[1:]))
            if written > 0:
                given = plain.original(row, index, plain.rules.heads[lane], window)
                stored.setdefault((0, min(written, plain.rules.window)), []).append((slots[0], given))
            continue
        assert (place, moves) == (owned.place, owned.moves)
        representations = {tier + 1 - first: codes for tier, codes in owned.codes.items()}
        if owned.full is not None:
            representations[0] = owned.full
        assert {segment for segment, slot in enumerate(slots) if slot >= 0} == {*representations}
        for segment, held in representations.items():
            stored.setdefault((segment, plain.rules.window), []).append((slots[segment], held))
    for (segment, tokens), owned_slots in stored.items():
        _check_blocks(layer, segment, tokens, owned_slots)


def _check_blocks(layer: Any, segment: int, tokens: int, owned: Sequence[tuple[int, Held]]) -> None:
    """The bytes of some slots, or what they decode to; no two windows share a slot."""
    slots = [slot for slot, _ in owned]
    assert len({*slots}) == len(slots)
    lent = {name: array[:, slots] for name, array in layer.pools[segment].lend().items()}
    if segment:
        quantizers = zip(("keys.", "values."), layer.wiring.codecs[segment - 1], strict=True)
        keys, values = (
            quantizer.decode(
                {name.removeprefix(kind): array for name, array in lent.items() if name.startswith(kind)},
                layer.wiring.geometry.head_dim,
            )
            for kind, quantizer in quantizers
        )
    else:
        keys, values = lent["keys"], lent["values"]
    wanted = torch.stack([held.keys if held.decoded is None else held.decoded for _, held in owned], 1)
    assert torch.equal(keys[:, :, :tokens], wanted)
    assert torch.equal(values[:, :, :tokens], torch.stack([held.values for _, held in owned], 1))
