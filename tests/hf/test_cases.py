"""Field cases: what breaks in tools of this kind, as tests on fixtures that can fail."""

import gc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pytest
import torch
from tests.oracle import assert_sensitive, generate, prompts, replay, tiny
from torch import Tensor
from transformers import DynamicCache

import qevict
from qevict import policies
from qevict.contracts.router import LayerBounds, TierRouter
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import Costs, Geometry, MovePlan, Need, Observation, Windows
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy, Tier
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.routers.filling import rank_candidates
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.cumulative import CumulativeAttention
from qevict.stores.memory import DeviceMemory
from qevict.testing.footprint import reachable_bytes, reachable_tensors
from qevict_template import KeyNorm


def int4_only(budget: str | None, window_tokens: int = 8) -> Policy:
    """Everything that is not recent as INT4."""
    base = policies.evict_only("20 %", window_tokens=window_tokens)
    tier = Tier("int4", keys=PerChannel(4), values=PerToken(4), store=DeviceMemory())
    return attrs.evolve(base, tiers=(tier,), router=GreedyTiers(), budget=budget)


def by_key_norm(budget: str) -> Policy:
    """The template's scorer."""
    return attrs.evolve(policies.evict_only(budget), scorer=KeyNorm())


UNQUANTIZED = {
    "sinks_recent": policies.sinks_recent("20 %", recent_tokens=8),
    "key_norm": attrs.evolve(by_key_norm("20 %"), recent_tokens=8),
    "attention": policies.evict_only("20 %", recent_tokens=8),
}


class TestC01LeftPaddedBatch:
    """A row's result does not depend on its padding. A middle length is what shows the fault."""

    @pytest.mark.parametrize("name", UNQUANTIZED)
    def test_rows_equal_their_solo_runs(self, name: str) -> None:
        model, (ids, mask) = tiny(), prompts(5, 100, 300)
        assert_sensitive(model, ids[2:])
        batch = generate(model, UNQUANTIZED[name], ids, mask, new=32)
        for row, length in enumerate((5, 100, 300)):
            solo = generate(model, UNQUANTIZED[name], ids[row : row + 1, -length:], new=32)
            assert batch.sequences[row, -32:].tolist() == solo.sequences[0, -32:].tolist()
            for layer in range(3):
                assert batch.cache.kept_positions(layer)[row] == solo.cache.kept_positions(layer)[0]

    def test_int4_rows_hold_the_codes_of_their_solo_runs(self) -> None:
        model, (ids, mask), policy = tiny(), prompts(5, 100, 300), int4_only("60 %")
        with qevict.attach(model, policy) as session:
            batch = session.prefill(ids, mask)
            for row, length in enumerate((5, 100, 300)):
                solo = session.prefill(ids[row : row + 1, -length:])
                assert batch.kept_positions(0)[row] == solo.kept_positions(0)[0]
                ours, theirs = lane_codes(batch, row), lane_codes(solo, 0)
                assert ours.shape == theirs.shape
                if length == 5:
                    assert not ours.numel()
                    continue
                assert ours.numel()
                # Last-bit differences of the inputs may turn a code that lies on an edge.
                assert (ours != theirs).float().mean() <= 0.002


def lane_codes(cache: Any, lane: int) -> Tensor:
    """The INT4 key codes of a lane, in order of position."""
    layer = cache.engine.layers[0]
    slots = layer.records.slots[(layer.records.lane_of() == lane) & (layer.records.place == 0), 1].long()
    codes: Tensor = layer.pools[1].lend()["keys.codes"][:, slots]
    return codes


class TestC06SeenIsNotKept:
    """A hand-written loop without position ids rotates by what was seen, not by what is kept."""

    @torch.no_grad()
    def test_hand_loop_equals_generate_and_the_oracle(self) -> None:
        model, (ids, mask), policy = tiny(), prompts(200), policies.evict_only("25 %", recent_tokens=16)
        assert_sensitive(model, ids)
        run = generate(model, policy, ids, new=21)
        with qevict.attach(model, policy):
            cache = qevict.Cache(model, policy)
            logits = [model(ids, **{CACHE_ARGUMENT: cache}).logits[:, -1]]
            for _ in range(20):
                assert cache.get_seq_length() == 199 + len(logits)
                logits.append(model(logits[-1].argmax(-1)[:, None], **{CACHE_ARGUMENT: cache}).logits[:, -1])
        expected = replay(model, run.sequences, mask, run.watch, patch=False)
        for own, generated, theirs in zip(logits, run.logits, expected, strict=True):
            torch.testing.assert_close(own, generated, atol=1e-5, rtol=0)
            torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)
        assert len(cache.kept_positions(0)[0]) < 200


@attrs.frozen
class HandSet(TierRouter):
    """Keeps a given number of windows in each lane, and gives each layer a share of its own."""

    name: ClassVar[str] = "hand_set"
    lanes: tuple[int, ...]
    shares: tuple[float, ...]

    def check(self, tiers: int) -> None:
        """Any."""

    def share(self, total_bytes: int, geometry: Geometry, bounds: LayerBounds) -> tuple[int, ...]:
        return tuple(int(total_bytes * share) for share in self.shares)

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        limits = []
        layers = len(capacities) // len(self.lanes)
        for lane, capacity in zip(self.lanes * layers, capacities, strict=True):
            assert capacity is not None
            limits.append([min(lane, capacity // costs.tier_bytes[0])])
        rank = rank_candidates(rankings[IMPORTANCE], windows)
        place = torch.where(rank < torch.tensor(limits), 0, 1)
        return MovePlan(torch.where(windows.candidate, place, windows.place))


class TestC08RaggedKeptCounts:
    """Lanes and layers of different lengths: filler takes no part, whatever it holds."""

    LANES = (4, 40, 17, 29)

    def policy(self) -> Policy:
        return attrs.evolve(
            policies.evict_only("60 tokens", window_tokens=1, sink_tokens=0, recent_tokens=2),
            granularity="kv_head",
            router=HandSet(self.LANES, (0.15, 0.3, 0.55)),
        )

    @pytest.mark.parametrize("impl", ["sdpa", "eager"])
    def test_equals_the_oracle_per_head_and_layer(self, impl: str) -> None:
        model = tiny(impl=impl, num_key_value_heads=4)
        ids, mask = prompts(64)
        run = generate(model, self.policy(), ids, mask, new=24)
        expected = replay(model, run.sequences, mask, run.watch, patch=False)
        for own, theirs in zip(run.logits, expected, strict=True):
            torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)
        kept = [[len(lane) for lane in run.cache.kept_positions(layer)] for layer in range(3)]
        assert len({tuple(layer) for layer in kept}) == 3, kept
        assert all(len(set(layer)) > 1 for layer in kept), kept

    @torch.no_grad()
    def test_what_filler_holds_changes_nothing(self) -> None:
        model, (ids, _) = tiny(num_key_value_heads=4), prompts(64)
        with qevict.attach(model, self.policy()) as session:
            plain = session.prefill(ids)
            loud = plain.fork()
            for layer in loud.engine.layers:
                used = torch.zeros(layer.pools[0].capacity, dtype=torch.bool)
                written = layer.records.window < 62 + 2
                used[layer.records.slots[written, 0].long()] = True
                assert not used.all()
                for array in layer.pools[0].lend().values():
                    array[:, ~used] = 1e6
            new = ids[:, :1]
            ours, theirs = (model(new, **{CACHE_ARGUMENT: cache}).logits for cache in (plain, loud))
        assert torch.equal(ours, theirs)


class TestC09MemoryGoesDown:
    """Bytes told are storages held, and they shrink."""

    @pytest.mark.parametrize(
        ("policy", "most"),
        [
            (policies.evict_only("20 %"), 0.25),
            (policies.qevict("20 %"), 0.25),
            (int4_only(None, window_tokens=64), 0.36),
        ],
        ids=["evict", "qevict", "int4"],
    )
    @torch.no_grad()
    def test_storages_shrink_after_4096_tokens_and_stay_small(self, policy: Policy, most: float) -> None:
        model, (ids, _) = tiny(num_hidden_layers=2, head_dim=64).to(torch.bfloat16), prompts(4096)
        with qevict.attach(model, policy) as session:
            cache = session.prefill(ids)
            for step in range(201):
                if step % 100 == 0:
                    gc.collect()
                    full = (4096 + step) * cache.wiring.geometry.token_bytes * 2
                    assert reachable_bytes(cache) == cache.nbytes() <= most * full
                    assert not [t for t in reachable_tensors(cache) if t.dtype == model.dtype and 4096 in t.shape]
                model(ids[:, step : step + 1], **{CACHE_ARGUMENT: cache})


@attrs.define
class _Fuse:
    left: int


@attrs.frozen
class Explodes(CumulativeAttention):  # the only way to break a run from inside
    """Raises after some updates."""

    name: ClassVar[str] = "explodes"
    fuse: _Fuse = attrs.field(factory=lambda: _Fuse(8), eq=False)

    def update(self, state: Any, observation: Observation) -> Any:
        self.fuse.left -= 1
        if not self.fuse.left:
            message = "scorer broke"
            raise RuntimeError(message)
        return CumulativeAttention.update(self, state, observation)


class TestC13NoStateLeftBehind:
    """All state lives in the cache; the model is as before after any exit."""

    def test_order_of_samples_does_not_matter(self) -> None:
        model, policy = tiny(), policies.qevict("30 %")
        samples = [prompts(length, seed=length)[0] for length in (90, 200, 141)]

        def answers(order: list[int]) -> dict[int, Any]:
            runs = {index: generate(model, policy, samples[index]) for index in order}
            return {index: (run.sequences.tolist(), run.cache.kept_positions(1)) for index, run in runs.items()}

        assert answers([0, 1, 2]) == answers([2, 1, 0])

    def test_an_exception_inside_leaves_the_model_as_it_was(self) -> None:
        model, (ids, _) = tiny(), prompts(120)
        expected = model.generate(ids, max_new_tokens=12, do_sample=False)
        before = model.config._attn_implementation
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        policy = attrs.evolve(policies.evict_only("30 %"), scorer=Explodes())
        with pytest.raises(RuntimeError, match="scorer broke"), qevict.attach(model, policy) as session:
            session.generate(ids, max_new_tokens=12, do_sample=False)
        assert model.config._attn_implementation == before
        assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)

    def test_an_interrupted_cache_says_so(self) -> None:
        model, (ids, _) = tiny(), prompts(120)
        policy = attrs.evolve(policies.evict_only("30 %"), scorer=Explodes(fuse=_Fuse(2)))
        with qevict.attach(model, policy) as session:
            cache = session.cache()
            for error in (RuntimeError, qevict.errors.InterruptedCacheError):
                with pytest.raises(error), torch.no_grad():
                    model(ids, **{CACHE_ARGUMENT: cache})

    def test_one_policy_serves_models_of_different_depth(self) -> None:
        policy, (ids, _) = policies.qevict("30 %"), prompts(100)
        for layers in (2, 3):
            run = generate(tiny(num_hidden_layers=layers), policy, ids)
            assert len(run.cache.engine.layers) == layers


class TestC14ShortPromptsAndTinyBudgets:
    """At least one real token, and the last one, is kept; reserved regions clip to the prompt."""

    BUDGETS = (1e-6, 0.001, 0.05, 0.2, 0.999)

    @pytest.mark.parametrize("sinks", [0, 4])
    @pytest.mark.parametrize("recent", [0, 1, 8, 64])
    @pytest.mark.parametrize("window", [1, 8])
    @torch.no_grad()
    def test_kept_sets_of_tiny_prompts(self, sinks: int, recent: int, window: int) -> None:
        model = tiny(num_hidden_layers=1)
        for length in (1, 2, 3, 4, 5, 8, 12):
            ids, _ = prompts(length)
            smaller: set[int] = set()
            for budget in self.BUDGETS:
                policy = attrs.evolve(
                    policies.evict_only(qevict.Fraction(budget), window_tokens=window),
                    sink_tokens=sinks,
                    recent_tokens=recent,
                )
                with qevict.attach(model, policy) as session:
                    cache = session.prefill(ids)
                    kept = set(cache.kept_positions(0)[0])
                    logits = model(ids[:, :1], **{CACHE_ARGUMENT: cache}).logits
                assert 1 <= len(kept) <= length
                assert length - 1 in kept
                assert smaller <= kept
                assert logits.isfinite().all()
                smaller = kept
                if length <= sinks + recent:
                    assert len(kept) == length

    @pytest.mark.parametrize(("sinks", "recent"), [(4, 8), (0, 64), (4, 64)])
    def test_prompts_within_the_protected_region_equal_the_stock_cache_bit_for_bit(
        self, sinks: int, recent: int
    ) -> None:
        model, (ids, _) = tiny(), prompts(5)
        policy = attrs.evolve(policies.qevict("1 %"), sink_tokens=sinks, recent_tokens=recent)
        run = generate(model, policy, ids, new=sinks + recent - 5)
        stock = model.generate(
            ids, max_new_tokens=sinks + recent - 5, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        assert all(torch.equal(own, theirs) for own, theirs in zip(run.logits, stock.logits, strict=True))


class TestC15ScoresInFp32:
    """Scores, sums and positions do not live in the dtype of the cache."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_norms_closer_than_an_ulp_still_rank(self, dtype: torch.dtype) -> None:
        keys = torch.zeros(1, 1, 2, 64, dtype=dtype)
        keys[0, 0, :, :63] = 1
        keys[0, 0, 1, 63] = 0.0625  # the norm grows by 2e-5 of itself: far below one bf16 ulp
        scorer = KeyNorm()
        observation = Observation(columns=torch.tensor([[0, 1]]), windows=2, keys=keys)
        state = scorer.update(scorer.start(1, 2, keys.device), observation)
        there, lengths = torch.ones(1, 2) > 0, torch.tensor([16])
        windows = Windows(torch.tensor([[0, 8]]), there, there, torch.zeros(1, 2).long(), (2,), lengths=lengths)
        ranks = scorer.rank(state, windows)[IMPORTANCE]
        assert ranks.dtype == torch.float32
        assert ranks[0, 0] > ranks[0, 1]  # short keys are kept
        for order in ([0, 1], [1, 0]):
            own = attrs.evolve(windows, positions=torch.tensor([[order[0] * 8, order[1] * 8]]))
            plan = GreedyTiers().plan({IMPORTANCE: ranks}, own, Costs((10,)), [10])
            assert plan.place.tolist() == [[0, 1]]

    def test_a_bf16_run_keeps_what_its_keys_in_fp32_would_keep(self) -> None:
        model, (ids, _) = tiny().to(torch.bfloat16), prompts(300)
        policy = by_key_norm("30 %")
        with qevict.attach(model, policy) as session:
            small = session.prefill(ids)
        full: Any = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, **{CACHE_ARGUMENT: full})
        norms = full.layers[0].keys[0].float().norm(dim=-1).mean(0)
        held = small.kept_positions(0)[0]
        kept = sorted({(position - 5) // 8 for position in held if position >= 5})
        aged = (300 - 5 - 32) // 8
        scores = -torch.stack([norms[5 + 8 * window : 13 + 8 * window].sum() for window in range(aged)])
        ranked = [window for window in kept if window < aged]
        assert ranked
        assert sorted(scores.argsort(descending=True)[: len(ranked)].tolist()) == ranked

    def test_position_4097_survives(self) -> None:
        model, (ids, _) = tiny(num_hidden_layers=1).to(torch.bfloat16), prompts(4100)
        with qevict.attach(model, policies.qevict("20 %")) as session:
            cache = session.prefill(ids).fork()
        assert 4097 in cache.kept_positions(0)[0]


class TestC23GroupedQueries:
    """KV heads are stored, query heads are averaged."""

    @pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 1)])
    @torch.no_grad()
    def test_kept_sets_equal_a_slow_reference(self, heads: int, kv_heads: int) -> None:
        model = tiny(impl="eager", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
        ids, _ = prompts(300)
        attention = model(ids, output_attentions=True).attentions
        for granularity in ("row", "kv_head"):
            policy = attrs.evolve(policies.evict_only("40 %"), granularity=granularity)
            with qevict.attach(model, policy) as session:
                cache = session.prefill(ids)
            for index, layer in enumerate(cache.engine.layers):
                assert layer.pools[0].lend()["keys"].shape[0] * layer.lanes == kv_heads
                received = attention[index][0].sum(1)
                groups = received.view(layer.lanes, -1, 300).mean(1)
                for lane, held in enumerate(cache.kept_positions(index)):
                    scores = groups[lane, 5 : 5 + 32 * 8].view(32, 8).sum(1)
                    kept = sorted({(position - 5) // 8 for position in held if 5 <= position < 5 + 32 * 8})
                    assert kept
                    assert sorted(scores.argsort(descending=True)[: len(kept)].tolist()) == kept


class TestC24DtypeInIsDtypeOut:
    """No drift, no promotion, no reinterpretation."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("impl", ["sdpa", "eager"])
    @pytest.mark.parametrize(
        "policy",
        [policies.full(), policies.evict_only("30 %"), policies.qevict("50 %", bits=8), int4_only("40 %")],
        ids=["full", "evict", "int8", "int4"],
    )
    def test_outputs_and_pools_have_the_model_dtype(self, policy: Policy, impl: str, dtype: torch.dtype) -> None:
        model, (ids, mask) = tiny(impl=impl).to(dtype), prompts(60, 120)
        seen = []
        handle = model.base_model.layers[1].self_attn.o_proj.register_forward_pre_hook(
            lambda _module, inputs: seen.append(inputs[0].dtype)
        )
        run = generate(model, policy, ids, mask, new=18)
        handle.remove()
        assert set(seen) == {dtype}
        assert {array.dtype for array in run.cache.engine.layers[0].pools[0].lend().values()} == {dtype}
        assert all(logits.isfinite().all() for logits in run.logits)

    def test_under_autocast(self) -> None:
        model, (ids, _) = tiny(), prompts(100)
        with torch.autocast("cpu", torch.bfloat16):
            run = generate(model, policies.qevict("40 %"), ids, new=18)
        assert all(logits.isfinite().all() for logits in run.logits)

    @pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
    def test_a_stored_dtype_of_its_own(self, stored: torch.dtype) -> None:
        model, (ids, _) = tiny(), prompts(200)
        run = generate(model, attrs.evolve(policies.qevict("40 %"), dtype=stored), ids, new=18)
        assert {array.dtype for array in run.cache.engine.layers[0].pools[0].lend().values()} == {stored}
        assert run.logits[-1].dtype == torch.float32
        assert run.cache.report().full_bytes == (200 + 17) * 2 * 2 * 16 * 2 * 3


def test_only_what_is_needed_is_shown() -> None:
    """What a scorer does not declare is not computed."""
    seen: list[Observation] = []

    @attrs.frozen
    class Watches(KeyNorm):
        name: ClassVar[str] = "watches"

        def update(self, state: Any, observation: Observation) -> Any:
            seen.append(observation)
            return KeyNorm.update(self, state, observation)

    generate(tiny(), attrs.evolve(policies.evict_only("30 %"), scorer=Watches()), prompts(80)[0], new=3)
    assert KeyNorm.needs == {Need.KEYS}
    assert all(each.mass is None and each.values is None and each.keys is not None for each in seen)
