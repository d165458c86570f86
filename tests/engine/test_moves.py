"""Windows on the move: codes, identity, score and position survive every trip between tiers."""

import importlib
from typing import Any, ClassVar

import attrs
import pytest
import torch
from tests.oracle import held, prompts, tiny
from torch import Tensor
from transformers import DynamicCache

import qevict
from qevict import policies
from qevict.backends.flash import FlashAttention
from qevict.backends.reference import ReferenceAttention
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Need, Observation, Windows
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.ledgers.re_encoding import ReEncoding
from qevict.policy import Tier
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.cumulative import CumulativeAttention
from qevict.stores.memory import DeviceMemory


@attrs.define
class Wish:
    """Positions that shall be hot, changed by the test between events."""

    hot: tuple[int, ...] = ()


@attrs.frozen
class Scripted(CumulativeAttention):  # keeps a real score, and ranks as the test wishes
    """Accumulates attention but ranks wished windows first."""

    name: ClassVar[str] = "scripted"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS})
    wish: Wish = attrs.field(factory=Wish, eq=False)

    def update(self, state: Any, observation: Observation) -> Any:
        return CumulativeAttention.update(self, state, observation)

    def rank(self, state: Any, windows: Windows) -> Any:
        base = -windows.positions.float()
        for order, position in enumerate(self.wish.hot):
            base = torch.where(windows.positions == position, 1e6 - order, base)
        return {IMPORTANCE: base}


def scripted(budget: str = "60 %", **changes: Any) -> tuple[Any, Wish]:
    """A QEvict policy that obeys."""
    wish = Wish()
    policy = attrs.evolve(policies.qevict(budget, quantized_share=0.5), scorer=Scripted(wish=wish), **changes)
    return policy, wish


def line_of(layer: Any, window: int) -> int | None:
    """The record of a window."""
    found = (layer.records.window == window).nonzero()[:, 0].tolist()
    return found[0] if found else None


def codes_of(layer: Any, line: int, segment: int = 1) -> dict[str, Tensor]:
    """A window's codes, copied."""
    slot = int(layer.records.slots[line, segment])
    assert slot >= 0
    return {name: array[:, slot].clone() for name, array in layer.pools[segment].lend().items()}


@torch.no_grad()
def walk(model: Any, cache: Any, steps: int = 8) -> None:
    """Decode to the next event."""
    for _ in range(steps):
        model(torch.randint(3, 97, (1, 1)), **{CACHE_ARGUMENT: cache})


def test_full_int2_full_int2_leaves_codes_identity_and_score() -> None:
    """The law of the migration-stable ledger, watched on one window over six events."""
    model, (ids, _) = tiny(), prompts(300)
    policy, wish = scripted()
    wish.hot = (5 + 8 * 20,)
    with qevict.attach(model, policy) as session:
        cache = session.prefill(ids)
        layer = cache.engine.layers[0]
        trail, codes, scores = [], [], []
        for event in range(6):
            line = line_of(layer, 20)
            assert line is not None
            place = int(layer.records.place[line])
            trail.append(place)
            scores.append(float(layer.records.state["mass"][line]))
            if int(layer.records.slots[line, 1]) >= 0:
                codes.append(codes_of(layer, line))
            if place == 0:
                check_promoted_keys(layer, model, line, codes[-1] if codes else None)
            wish.hot = () if event % 2 == 0 else (5 + 8 * 20,)
            walk(model, cache)
    assert trail == [0, 1, 0, 1, 0, 1]
    assert all(torch.equal(array, codes[0][name]) for again in codes for name, array in again.items())
    assert len(codes) == 5, "codes are owned from the first demotion on, also while promoted"
    assert scores == sorted(scores)
    assert scores[0] > 0
    assert int(layer.records.moves[line_of(layer, 20)]) >= 5
    assert cache.report().promotions >= 2


def test_a_promoted_window_is_attended_to_once() -> None:
    """Its codes stay, and are not read; the plain backend, which follows slots by window, says what is right."""
    model, (ids, _) = tiny(), prompts(300)
    policy, wish = scripted()
    answers = []
    for backend in (FlashAttention(), ReferenceAttention()):
        wish.hot = ()
        with qevict.attach(model, attrs.evolve(policy, backend=backend)) as session:
            cache = session.prefill(ids)
            torch.manual_seed(0)
            wish.hot = tuple(5 + 8 * window for window in range(14, 20))
            walk(model, cache)
            assert cache.report().promotions > 0
            with torch.no_grad():
                answers.append(model(ids[:, :1], **{CACHE_ARGUMENT: cache}).logits)
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)


def check_promoted_keys(layer: Any, model: Any, line: int, codes: dict[str, Tensor] | None) -> None:
    """A promoted window holds its decoded keys, turned by the model's own function at their original positions."""
    if codes is None:
        return
    for_keys, for_values = layer.wiring.codecs[0]
    own = {name.removeprefix("keys."): array[:, None] for name, array in codes.items() if name.startswith("keys.")}
    theirs = {
        name.removeprefix("values."): array[:, None] for name, array in codes.items() if name.startswith("values.")
    }
    positions = torch.arange(5 + 8 * 20, 5 + 8 * 21)[None]
    keys = for_keys.decode(own, 16)[:, 0][None]
    cos, sin = model.base_model.rotary_emb(keys, positions)
    turned = importlib.import_module(type(model).__module__).apply_rotary_pos_emb(keys, keys, cos, sin)[1][0]
    slot = int(layer.records.slots[line, 0])
    dense = layer.pools[0].lend()
    torch.testing.assert_close(dense["keys"][:, slot], turned, atol=1e-6, rtol=1e-6)
    assert torch.equal(dense["values"][:, slot], for_values.decode(theirs, 16)[:, 0])


@pytest.mark.parametrize("lengths", [(300,), (120, 300)], ids=["solo", "padded"])
def test_codes_stand_for_the_models_own_keys_and_values(lengths: tuple[int, ...]) -> None:
    """Decoded and turned forward again, they are the model's within a step of the grid: encoded before rotation."""
    model, (ids, mask) = tiny(), prompts(*lengths)
    with qevict.attach(model, policies.qevict("60 %", bits=8)) as session:
        cache = session.prefill(ids, mask)
    assert cache.report().windows["int8"] > 20
    full: Any = DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: full})
    for index, layer in enumerate(cache.engine.layers):
        found = held(cache, model, index)
        scales = layer.pools[1].lend()
        for name, ours, theirs in (
            ("keys", found.keys, full.layers[index].keys),
            ("values", found.values, full.layers[index].values),
        ):
            step = float(scales[f"{name}.scale"].max())
            assert 0 < float((ours - theirs)[found.keep].abs().max()) <= step


def test_three_tiers_and_eviction() -> None:
    """Full, INT8 and INT2: every live window owns exactly the slots that its place and the ledger call for."""
    tiers = (
        policies.full().tiers[0],
        Tier("int8", keys=PerChannel(8), values=PerToken(8), store=DeviceMemory()),
        Tier("int2", keys=PerChannel(2), values=PerToken(2), store=DeviceMemory()),
    )
    policy, wish = scripted("35 %", tiers=tiers, router=GreedyTiers(shares=(0.3, 0.4, 0.3)))
    model, (ids, _) = tiny(), prompts(400)
    with qevict.attach(model, policy) as session:
        cache = session.prefill(ids)
        for event in range(8):
            check_slots(cache)
            wish.hot = tuple(5 + 8 * window for window in range(event * 3, event * 3 + 5))
            walk(model, cache)
    windows = cache.report().windows
    assert all(windows[name] for name in ("full", "int8", "int2"))
    assert cache.report().promotions
    assert cache.report().evictions


def test_a_ledger_that_forgets_codes() -> None:
    """Promotion lets go of the codes; slots stay consistent while many windows swap places at once."""
    policy, wish = scripted("60 %", ledger=ReEncoding())
    model, (ids, _) = tiny(), prompts(400)
    with qevict.attach(model, policy) as session:
        cache = session.prefill(ids)
        for event in range(8):
            check_slots(cache)
            held = cache.engine.layers[0].records
            assert ((held.slots >= 0).sum(1) == 1).all()
            wish.hot = tuple(5 + 8 * window for window in range(event * 4, event * 4 + 8))
            walk(model, cache)
    assert cache.report().promotions > 20


def test_what_moves_without_copies_is_encoded_anew_from_what_it_was() -> None:
    """INT2, INT8, INT2: at each move the codes are those of what the codes before decode to, and no others stay."""
    tiers = tuple(Tier(f"int{bits}", PerChannel(bits), PerToken(bits), store=DeviceMemory()) for bits in (8, 2))
    policy, wish = scripted("40 %", tiers=tiers, ledger=ReEncoding())
    model, (ids, _) = tiny(num_hidden_layers=1), prompts(300)
    with qevict.attach(model, policy) as session:
        cache = session.prefill(ids)
        layer, before = cache.engine.layers[0], None
        for segment in (2, 1, 2, 1):
            line = line_of(layer, 25)
            assert line is not None
            assert (layer.records.slots[line] >= 0).tolist() == [False, segment == 1, segment == 2]
            codes = codes_of(layer, line, segment)
            if before is not None:
                check_encoded_anew(layer, segment, codes, before)
            before, wish.hot = codes, ((5 + 8 * 25,) if segment == 2 else ())
            walk(model, cache)


def check_encoded_anew(layer: Any, segment: int, codes: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """They are codes of what the codes of the other of two tiers decode to."""
    pairs = zip(("keys.", "values."), layer.wiring.codecs[segment - 1], layer.wiring.codecs[2 - segment], strict=True)
    for part, coder, other in pairs:
        own = {name.removeprefix(part): array[:, None] for name, array in before.items() if name.startswith(part)}
        for name, array in coder.encode(other.decode(own, 16)).items():
            assert torch.equal(array[:, 0], codes[part + name])


def check_slots(cache: Any) -> None:
    """Slots are owned once, lie inside their pool, and there is one for the place of each window."""
    for layer in cache.engine.layers:
        records = layer.records
        segment = (records.place.long() + layer.wiring.first_segment).clamp(min=0)
        assert (records.slots.gather(1, segment[:, None]) >= 0).all()
        for index, pool in enumerate(layer.pools):
            used = records.slots[:, index][records.slots[:, index] >= 0]
            assert len(used.unique()) == len(used) == sum(layer.live[index])
            assert sum(layer.regions[index]) == pool.capacity
            if index:  # codes that outlive a promotion are not a second window
                lives_there = records.slots[segment == index, index].long()
                assert torch.equal((~layer.hidden[index]).nonzero()[:, 0], lives_there.sort().values)
            check_regions(layer, index)
        assert records.lines == sum(map(sum, records.counts))


def check_regions(layer: Any, segment: int) -> None:
    """The slots of a lane lie in its own region."""
    first = 0
    for lane, (region, live) in enumerate(zip(layer.regions[segment], layer.live[segment], strict=True)):
        slots = layer.records.slots[layer.records.lane_of() == lane, segment]
        own = slots[slots >= 0]
        assert len(own) == live
        assert ((own >= first) & (own < first + region)).all()
        first += region


def test_min_tokens_leaves_short_rows_whole() -> None:
    """Rows below the threshold keep everything; longer ones beside them do not."""
    model, (ids, mask) = tiny(), prompts(100, 300)
    policy = attrs.evolve(policies.evict_only("20 %"), min_tokens=150)
    with qevict.attach(model, policy) as session:
        cache = session.prefill(ids, mask)
    short, long = cache.kept_positions(0)
    assert short == list(range(100))
    assert len(long) < 100


def test_strict_raises_when_the_protected_tokens_exceed_the_budget() -> None:
    """Otherwise the report names the overshoot."""
    model, (ids, _) = tiny(), prompts(60)
    loose = policies.evict_only("10 %")
    with qevict.attach(model, loose) as session:
        assert session.prefill(ids).report().overshoot_bytes > 0
    with (
        qevict.attach(model, attrs.evolve(loose, strict=True)) as session,
        pytest.raises(qevict.errors.BudgetExceededError, match="raise the budget"),
    ):
        session.prefill(ids)
