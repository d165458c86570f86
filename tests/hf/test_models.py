"""Families of models: hybrid layers, sizes, rotary tables, and what is refused."""

from typing import Any

import attrs
import pytest
import torch
from tests.oracle import FAMILIES, assert_sensitive, generate, impls, prompts, replay, scores, tiny
from tests.ropes import EXACT, ORIGINAL, changing
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SiglipVisionConfig,
)
from transformers.cache_utils import DynamicSlidingWindowLayer

import qevict
from qevict import errors, policies
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy
from qevict.testing.footprint import reachable_bytes

HYBRID = ("mistral_sliding", "qwen2_sliding", "gemma2", "gemma3", "gpt_oss")
WINDOW = 32
EVICTING = policies.evict_only("30 %", recent_tokens=8)
ENCODING = policies.qevict("30 %", recent_tokens=8)
ASK: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


TINY_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def equals_oracle(model: Any, policy: Policy, *lengths: int, new: int, patch: bool = False) -> Any:
    """Every step's logits are those of a full run that sees what the policy held."""
    ids, mask = prompts(*lengths)
    run = generate(model, policy, ids, mask, new=new)
    for own, theirs in zip(run.logits, replay(model, run.sequences, mask, run.watch, patch=patch), strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)
    return run


@pytest.mark.filterwarnings("ignore::qevict.errors.NothingRuledWarning")
class TestC04SlidingAndHybridLayers:
    """A layer that drops tokens by itself is left alone; positions and lengths are those of tokens seen."""

    @pytest.mark.parametrize("family", HYBRID)
    def test_without_a_budget_it_is_the_stock_cache(self, family: str) -> None:
        model = tiny(family, impl=impls(family)[0])
        assert_sensitive(model, prompts(100)[0])
        for length, new in ((20, 16), (31, 4), (32, 4), (33, 4), (100, 40)):
            ids, _ = prompts(length)
            stock = model.generate(ids, max_new_tokens=new, **ASK)
            with qevict.attach(model, policies.full()) as session:
                found = session.generate(ids, max_new_tokens=new, **ASK)
            assert all(torch.equal(own, theirs) for own, theirs in zip(found.logits, stock.logits, strict=True))

    @pytest.mark.parametrize("family", HYBRID)
    def test_with_a_budget_it_is_the_oracle(self, family: str) -> None:
        model = tiny(family, impl=impls(family)[0])
        run = equals_oracle(model, EVICTING, 33, 100, new=40)
        assert run.cache.get_seq_length() == run.cache.get_seq_length(2) == 139
        for index, layer in enumerate(run.cache.layers):
            if index in run.cache.ruled_layers:
                assert len(run.cache.kept_positions(index)[1]) < 139
            else:
                assert type(layer) is DynamicSlidingWindowLayer
                assert layer.keys is not None
                assert layer.keys.shape[2] == WINDOW - 1

    @pytest.mark.parametrize("family", ["gemma3", "qwen2_sliding"])
    @torch.no_grad()
    def test_local_layers_hold_what_a_stock_cache_holds_and_bytes_are_real(self, family: str) -> None:
        model, (ids, _) = tiny(family), prompts(200)
        stock = DynamicCache(config=model.config)
        model(ids, **{CACHE_ARGUMENT: stock})
        with qevict.attach(model, policies.evict_only("30 %")) as session:
            cache = session.prefill(ids)
        report = cache.report()
        local = [index for index in range(3) if index not in cache.ruled_layers]
        for index in local:
            for name in ("keys", "values"):
                assert torch.equal(getattr(cache.layers[index], name), getattr(stock.layers[index], name))
        assert reachable_bytes(cache) == cache.nbytes() == report.exact_bytes == sum(report.bytes_by_kind.values())
        assert report.bytes_by_kind["layers not ruled"] > 0
        assert report.overshoot_bytes == 0
        assert report.exact_bytes - report.bytes_by_kind["layers not ruled"] <= (report.budget_bytes or 0)
        assert report.ruled_layers == len(cache.ruled_layers) == 3 - len(local)
        assert f"layers ruled by the policy: {report.ruled_layers}" in str(report)

    def test_a_budget_is_of_the_ruled_layers(self) -> None:
        model, (ids, _) = tiny("gemma3"), prompts(200)
        with qevict.attach(model, policies.evict_only("30 %")) as session:
            cache = session.prefill(ids)
        token_bytes = 2 * 2 * 16 * 4
        assert cache.report().budget_bytes == int(0.3 * 200 * token_bytes)

    def test_what_is_not_ruled_cannot_be_asked_for_its_positions(self) -> None:
        model, (ids, _) = tiny("gemma3"), prompts(40)
        with qevict.attach(model, EVICTING) as session:
            cache = session.prefill(ids)
        assert cache.kept_positions(1)
        with pytest.raises(errors.InputError, match="layer 0 is not ruled by the policy; ruled layers: 1"):
            cache.kept_positions(0)

    @torch.no_grad()
    def test_an_input_that_is_refused_half_way_spoils_the_cache_and_it_says_so(self) -> None:
        model, (ids, _) = tiny("gemma3"), prompts(40)
        with qevict.attach(model, EVICTING) as session:
            cache = session.prefill(ids)
            with pytest.raises(errors.InputError, match="count up by one"):
                model(ids[:, :3], position_ids=torch.tensor([[1, 5, 9]]), **{CACHE_ARGUMENT: cache})
            with pytest.raises(errors.InterruptedCacheError):
                model(ids[:, :1], **{CACHE_ARGUMENT: cache})

    def test_one_recording_plays_into_hybrid_caches(self) -> None:
        model, (ids, _) = tiny("gemma3"), prompts(100)
        with qevict.attach(model, EVICTING) as session:
            recording, read = session.record(ids), session.prefill(ids)
            for _ in range(2):
                played = session.cache()
                recording.play_into(played)
                assert played.report() == read.report()
                again = session.generate(ids[:, :4], cache=played, max_new_tokens=12, **ASK)
            plain = session.generate(ids[:, :4], cache=read, max_new_tokens=12, **ASK)
        assert all(torch.equal(own, theirs) for own, theirs in zip(again.logits, plain.logits, strict=True))


class TestNothingIsRuled:
    """All layers are local: attaching warns, and the library does everything."""

    def test_attaching_warns(self) -> None:
        attached = qevict.attach(tiny("mistral_sliding"), ENCODING)
        with pytest.warns(errors.NothingRuledWarning, match="every layer of MistralForCausalLM has a sliding window"):
            attached.__enter__()
        attached.__exit__(None, None, None)

    @pytest.mark.filterwarnings("ignore::qevict.errors.NothingRuledWarning")
    def test_it_is_the_stock_cache_and_says_so(self) -> None:
        model, (ids, mask) = tiny("mistral_sliding"), prompts(20, 80)
        stock = model.generate(ids, attention_mask=mask, max_new_tokens=20, **ASK)
        with qevict.attach(model, ENCODING) as session:
            cache = session.prefill(ids[1:])
            found = session.generate(ids, attention_mask=mask, max_new_tokens=20, **ASK)
            with pytest.raises(errors.InputError, match="give an attention_mask over all tokens"):
                session.generate(ids[1:, :3], cache=cache, max_new_tokens=2)
            more = session.generate(ids[1:, :3], cache=cache, attention_mask=torch.ones(1, 83), max_new_tokens=2)
            with pytest.raises(errors.UnsupportedOperationError, match="no layer of the recorded model"):
                session.record(ids).play_into(session.cache())
        assert more.shape == (1, 5)
        assert torch.equal(found.sequences, stock.sequences)
        report = cache.report()
        assert (report.ruled_layers, report.budget_bytes, report.overshoot_bytes) == (0, None, 0)
        assert report.exact_bytes == report.full_bytes == cache.nbytes() == reachable_bytes(cache) > 0


def implementations(model: Any) -> dict[str, str]:
    return {name: own.config._attn_implementation for name, own in model.named_modules() if hasattr(own, "config")}


class TestC20Sizes:
    """Sizes come from the model, whatever they are."""

    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
    @pytest.mark.parametrize("lengths", [(100,), (40, 100)], ids=["even", "ragged"])
    def test_head_dim(self, head_dim: int, lengths: tuple[int, ...]) -> None:
        model = tiny("llama", head_dim=head_dim, num_hidden_layers=2)
        run = equals_oracle(model, ENCODING, *lengths, new=12, patch=True)
        assert run.cache.report().windows["int2"] > 0

    @pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)], ids=["mha", "gqa", "mqa", "odd"])
    @pytest.mark.parametrize("granularity", ["row", "kv_head"])
    def test_heads(self, heads: int, kv_heads: int, granularity: Any) -> None:
        sizes: Any = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
        model = tiny("qwen3", num_hidden_layers=2, **sizes)
        equals_oracle(model, attrs.evolve(ENCODING, granularity=granularity), 100, new=12, patch=True)

    def test_sizes_that_the_tensors_belie_are_refused_before_anything_is_stored(self) -> None:
        model, (ids, _) = tiny("llama"), prompts(20)
        with qevict.attach(model, EVICTING) as session:
            model.config.head_dim = 32
            cache = session.cache()
            with pytest.raises(errors.UnsupportedModelError, match=r"\(4, 2, 32, 32\).*\(4, 2, 16, 16\)"):
                model(ids, **{CACHE_ARGUMENT: cache})
        assert cache.get_seq_length() == 0

    def test_a_text_configuration_inside_another(self) -> None:
        text = tiny("gemma3").config
        vision = SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
        )
        torch.manual_seed(0)
        config = Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4)
        wrapped = Gemma3ForConditionalGeneration(config).eval()
        wrapped.generation_config.eos_token_id = None
        self.check_wrapped(wrapped)

    def test_a_llava_of_a_llama(self) -> None:
        text = tiny("llama").config
        torch.manual_seed(0)
        config = LlavaConfig(
            text_config=text.to_dict(), vision_config={"model_type": "clip_vision_model"} | TINY_VISION
        )
        self.check_wrapped(LlavaForConditionalGeneration(config).eval())

    @staticmethod
    def check_wrapped(model: Any) -> None:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        before = implementations(model)
        ids, mask = prompts(40, 100)
        stock = model.generate(ids, attention_mask=mask, max_new_tokens=12, **ASK)
        with qevict.attach(model, policies.full()) as session:
            full = session.generate(ids, attention_mask=mask, max_new_tokens=12, **ASK)
        assert torch.equal(full.sequences, stock.sequences)
        run = equals_oracle(model, EVICTING, 40, 100, new=12)
        assert len(run.cache.kept_positions(run.cache.ruled_layers[0])[1]) < 100
        assert before == implementations(model)


CHANGING = changing(16)


def with_rope(family: str, kind: str, parameters: dict[str, Any]) -> Any:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **parameters}
    own: Any = {"original_max_position_embeddings": ORIGINAL} if family == "phi3" else {}
    return tiny(family, rope_parameters=rope, max_position_embeddings=120, num_hidden_layers=2, **own)


class TestC12ScaledRope:
    """Keys turn back by the model's own tables; positions go far beyond those that the tables were made for."""

    @pytest.mark.parametrize("kind", sorted(EXACT.keys() - {"default"}))
    @pytest.mark.parametrize("lengths", [(200,), (60, 200)], ids=["even", "ragged"])
    def test_codes_turn_by_the_models_own_table(self, kind: str, lengths: tuple[int, ...]) -> None:
        run = equals_oracle(with_rope("llama", kind, EXACT[kind]), ENCODING, *lengths, new=16, patch=True)
        assert run.cache.report().windows["int2"] > 0

    @pytest.mark.parametrize(("family", "kind"), [("llama", "dynamic"), ("llama", "longrope"), ("phi3", "longrope")])
    def test_where_tables_change_kept_keys_stay_as_they_were_written(self, family: str, kind: str) -> None:
        """The prompt ends before the tables change, the answer goes on behind that."""
        model = with_rope(family, kind, CHANGING[kind])
        tables = {
            length: model.get_decoder().rotary_emb(torch.ones(1), torch.arange(length)[None]) for length in (60, 150)
        }
        assert not torch.equal(tables[60][0][:, :60], tables[150][0][:, :60])
        length = 60 if kind == "longrope" else 110
        equals_oracle(model, EVICTING, length, new=24)

    @pytest.mark.parametrize("kind", CHANGING)
    def test_where_tables_change_codes_are_refused(self, kind: str) -> None:
        model = with_rope("llama", kind, CHANGING[kind])
        before = model.config._attn_implementation
        reason = f"RoPE of type '{kind}' changes its frequencies.*can be used"
        with pytest.raises(errors.UnsupportedModelError, match=reason), qevict.attach(model, ENCODING):
            pytest.fail("attached")
        assert model.config._attn_implementation == before

    def test_phi3_keeps_the_policy_where_a_text_outgrows_its_first_context(self) -> None:
        """Phi-3's preparation of inputs lets go of a cache there."""
        model = tiny("phi3", original_max_position_embeddings=ORIGINAL)
        for length, new in ((58, 12), (80, 4)):
            run = equals_oracle(model, EVICTING, length, new=new)
            assert run.cache.get_seq_length() == length + new - 1


class TestC17WhatScorersSeeIsWhatAttentionUsed:
    """Masses are those of the model's own attention: normed queries, its own scaling, caps and sinks."""

    @pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"mistral_sliding"}))
    @torch.no_grad()
    def test_masses_are_the_probabilities_of_eager_attention(self, family: str) -> None:
        model, (ids, _) = tiny(family, impl="eager"), prompts(101)
        weights = model(ids, output_attentions=True).attentions
        policy = attrs.evolve(policies.evict_only("50 %"), budget=None)
        for impl in impls(family):
            with qevict.attach(tiny(family, impl=impl), policy) as session:
                cache = session.prefill(ids)
            for index, layer in enumerate(cache.ruled_layers):
                by_token = weights[layer][0].sum((0, 1))[5:101]
                found = scores(cache.engine.layers[index])[0]
                expected = by_token.view(-1, 8).sum(1) / weights[layer].shape[1]
                torch.testing.assert_close(torch.tensor(found[:12]), expected, atol=1e-4, rtol=1e-5)

    @pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
    def test_kept_sets_do_not_depend_on_the_implementation(self, family: str) -> None:
        ids, mask = prompts(60, 150)
        kept = []
        for impl in ("sdpa", "eager"):
            with qevict.attach(tiny(family, impl=impl), EVICTING) as session:
                cache = session.cache()
                session.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=20, do_sample=False)
            kept.append([cache.kept_positions(layer) for layer in cache.ruled_layers])
        assert kept[0] == kept[1]


class TestRefused:
    """What cannot be honoured is refused when attached, each with its reason."""

    @pytest.mark.parametrize(
        ("model_class", "config", "reason"),
        [
            (
                DeepseekV3ForCausalLM,
                DeepseekV3Config(
                    num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=97,
                    kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
                    num_key_value_heads=2, first_k_dense_replace=1, n_routed_experts=2, moe_intermediate_size=16,
                    n_group=1, topk_group=1, num_experts_per_tok=1,
                ),
                "multi-head latent attention",
            ),
            (
                Qwen3NextForCausalLM,
                Qwen3NextConfig(
                    num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=97,
                    num_key_value_heads=2, head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
                    shared_expert_intermediate_size=16, linear_num_value_heads=2, linear_num_key_heads=2,
                    linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["full_attention"],
                ),
                "'qwen3_next' is not supported",
            ),
        ],
        ids=["mla", "unknown-family"],
    )  # fmt: skip
    def test_with_its_reason(self, model_class: Any, config: Any, reason: str) -> None:
        model = model_class(config).eval()
        with pytest.raises(errors.UnsupportedModelError, match=reason), qevict.attach(model, policies.full()):
            pytest.fail("attached")

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"num_kv_shared_layers": 2}, "keys and values of other layers"),
            ({"use_bidirectional_attention": True}, "not causal"),
            ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "type chunked_attention"),
            ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "type linear_attention"),
        ],
        ids=["shared", "bidirectional", "chunked", "linear"],
    )
    def test_what_a_configuration_asks_for(self, changes: dict[str, Any], reason: str) -> None:
        model = tiny("llama")
        for name, value in changes.items():
            setattr(model.config, name, value)
        with pytest.raises(errors.UnsupportedModelError, match=reason), qevict.attach(model, policies.full()):
            pytest.fail("attached")


def test_every_family_has_a_fixture() -> None:
    """The list that users read in a refusal is the list that is tested."""
    from qevict.hf.support import FAMILIES as SUPPORTED

    tested = {config_class.model_type for _, config_class, _ in FAMILIES.values()}
    assert tested == set(SUPPORTED)
