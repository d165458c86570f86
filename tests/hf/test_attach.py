"""Attaching: nothing left behind, nothing disturbed, bad input refused before it costs anything."""

import gc
import subprocess
import sys
import weakref
from typing import Any, cast

import attrs
import pytest
import torch
from tests.oracle import generate, prompts, tiny
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import qevict
from qevict import errors, policies
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.hf.names import BASES
from qevict.testing.footprint import reachable_tensors
from qevict_template import KeyNorm

ASK: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


def small(model_class: Any, config_class: Any, **sizes: Any) -> Any:
    """An untrained model of another family."""
    base = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return model_class(config_class(**(base | heads | sizes))).eval()


def test_names_are_not_taken_for_kernels() -> None:
    """transformers reads "flash" and "/" in a name as a kernel to load."""
    assert not any("flash" in name or "/" in name for name in BASES)


def test_two_caches_on_one_model_do_not_disturb_each_other() -> None:
    """Interleaved forwards, two policies."""
    model = tiny()
    first, second = prompts(150, seed=1)[0], prompts(150, seed=2)[0]
    plans = (policies.qevict("30 %"), policies.evict_only("30 %"))
    with qevict.attach(model, plans[0]):
        alone = [
            decode(model, [qevict.Cache(model, plan)], [ids]) for plan, ids in zip(plans, (first, second), strict=True)
        ]
        together = decode(model, [qevict.Cache(model, plan) for plan in plans], [first, second])
    for index in range(2):
        assert all(torch.equal(own, theirs) for own, theirs in zip(together[index], alone[index][0], strict=True))


@torch.no_grad()
def decode(model: Any, caches: list[Any], new: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Greedy decoding by hand, the caches taking turns; the logits of each."""
    logits: list[list[torch.Tensor]] = [[] for _ in caches]
    for _ in range(20):
        for index, cache in enumerate(caches):
            out = model(new[index], **{CACHE_ARGUMENT: cache}).logits[:, -1]
            logits[index].append(out)
            new[index] = out.argmax(-1)[:, None]
    return logits


def test_an_inner_attach_leaves_the_outer_one_working() -> None:
    """Nested contexts restore in order."""
    model, (ids, _) = tiny(), prompts(100)
    stock = model.config._attn_implementation
    expected = generate(model, policies.qevict("40 %"), ids).sequences
    with qevict.attach(model, policies.qevict("40 %")) as outer:
        with qevict.attach(model, policies.full()) as inner:
            assert torch.equal(inner.generate(ids, **ASK), model.generate(ids, **ASK))
        found = outer.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(found, expected)
    assert model.config._attn_implementation == stock


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_a_foreign_cache_passes_through_bit_for_bit(impl: str) -> None:
    """Inside attach, a DynamicCache is a DynamicCache; also with pads."""
    model, (ids, mask) = tiny(impl=impl), prompts(20, 90)
    how = ASK | {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, **how)
    with qevict.attach(model, policies.qevict("20 %")):
        found = model.generate(ids, **how)
        cached = model.generate(ids, **how, **{CACHE_ARGUMENT: DynamicCache(config=model.config)})
    for run in (found, cached):
        assert all(torch.equal(own, theirs) for own, theirs in zip(run.logits, expected.logits, strict=True))


def test_a_cache_dies_with_its_last_name() -> None:
    """No reference cycle keeps its bytes alive."""
    model, (ids, _) = tiny(), prompts(60)
    with qevict.attach(model, policies.qevict("40 %")) as session:
        cache = session.prefill(ids)
        gone = weakref.ref(cache)
        gc.disable()
        try:
            del cache
            assert gone() is None
        finally:
            gc.enable()


class TestForkAndTurns:
    """One context, many questions."""

    def test_forks_answer_as_fresh_runs_in_any_order(self) -> None:
        model, (ids, _), policy = tiny(), prompts(200), policies.qevict("30 %")
        questions = [prompts(7, seed=seed)[0] for seed in (1, 2, 3)]
        with qevict.attach(model, policy) as session:
            cache = session.prefill(ids)
            before = cache.report()
            forked = [session.generate(question, cache=cache.fork(), **ASK) for question in questions]
            assert cache.report() == before
            again = [session.generate(question, cache=cache.fork(), **ASK) for question in questions[::-1]]
            fresh = [session.generate(question, cache=session.prefill(ids), **ASK) for question in questions]
        for one, two, three in zip(forked, again[::-1], fresh, strict=True):
            assert torch.equal(one, two)
            assert torch.equal(one, three)

    def test_a_turn_of_many_tokens_on_a_full_policy_equals_the_stock_cache(self) -> None:
        model, (ids, _) = tiny(), prompts(80)
        question, _ = prompts(9, seed=5)
        with qevict.attach(model, policies.full()) as session:
            found = session.generate(question, cache=session.prefill(ids), **ASK)
        whole = model.generate(torch.cat((ids, question), 1), **ASK)
        assert torch.equal(found[:, 9:], whole[:, 89:])

    def test_padded_contexts_go_on_with_new_tokens_only(self) -> None:
        model, (ids, mask), policy = tiny(), prompts(60, 140), policies.evict_only("40 %")
        question = torch.cat([prompts(7, seed=seed)[0] for seed in (5, 6)])
        with qevict.attach(model, policy) as session:
            batch = session.generate(question, cache=session.prefill(ids, mask), **ASK)
            for row, length in enumerate((60, 140)):
                own = session.prefill(ids[row : row + 1, -length:])
                solo = session.generate(question[row : row + 1], cache=own, **ASK)
                assert torch.equal(batch[row], solo[0])

    @pytest.mark.parametrize("chunk", [64, 50, 1])
    def test_a_context_in_chunks_keeps_what_it_keeps_at_once(self, chunk: int) -> None:
        model, (ids, mask) = tiny(), prompts(40, 130)
        with qevict.attach(model, policies.evict_only("30 %")) as session:
            whole = session.prefill(ids, mask)
            pieces = session.prefill(ids, mask, chunk_tokens=chunk)
        for layer in range(3):
            assert whole.kept_positions(layer) == pieces.kept_positions(layer)
        assert pieces.report().exact_bytes == whole.report().exact_bytes


class TestModes:
    """Autograd, inference mode, and parts of a prompt."""

    def test_a_forward_outside_no_grad_leaves_no_graph_in_the_cache(self) -> None:
        model, (ids, _) = tiny(), prompts(120)
        with qevict.attach(model, policies.qevict("40 %")) as session:
            cache = session.cache()
            for step in range(20):
                model(ids if not step else ids[:, :1], **{CACHE_ARGUMENT: cache})
            assert not any(tensor.requires_grad for tensor in reachable_tensors(cache))
            cache.fork()

    def test_a_prompt_read_in_inference_mode_goes_on_without_it(self) -> None:
        model, (ids, _) = tiny(), prompts(120)
        with qevict.attach(model, policies.qevict("40 %")) as session:
            expected = session.generate(ids[:, :5], cache=session.prefill(ids), **ASK)
            with torch.inference_mode():
                cache = session.cache()
                model(ids, **{CACHE_ARGUMENT: cache})
            assert torch.equal(session.generate(ids[:, :5], cache=cache, **ASK), expected)

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    @pytest.mark.parametrize("chunk", [50, 30])
    def test_the_prompts_last_queries_are_the_same_in_chunks(self, chunk: int, dtype: Any) -> None:
        model, (ids, mask) = tiny(), prompts(90, 130)
        policy = policies.evict_only("40 %", prompt_queries=32)
        with qevict.attach(model, policy) as session:
            whole = session.prefill(ids, mask)
        with qevict.attach(model, attrs.evolve(policy, dtype=dtype)) as session:
            pieces = session.prefill(ids, mask, chunk_tokens=chunk)
        for own, theirs in zip(whole.engine.layers, pieces.engine.layers, strict=True):
            total = own.records.state["mass"].sum(), theirs.records.state["mass"].sum()
            assert abs(total[0] - total[1]) < 0.2 * total[0]

    def test_an_empty_cache_is_a_new_one(self) -> None:
        model, (ids, _) = tiny(), prompts(60)
        with qevict.attach(model, policies.evict_only("40 %")) as session:
            assert torch.equal(session.generate(ids, cache=session.cache(), **ASK), session.generate(ids, **ASK))

    def test_impossible_chunks_and_prompts(self) -> None:
        model, (ids, _) = tiny(), prompts(60)
        with qevict.attach(model, policies.full()) as session:
            for chunk in (0, -1):
                with pytest.raises(errors.InputError, match="at least 1"):
                    session.prefill(ids, chunk_tokens=chunk)
            with pytest.raises(errors.InputError, match="at least 1"):
                session.cache().expect(0)

    @torch.no_grad()
    def test_a_masked_token_while_decoding(self) -> None:
        model, (ids, _) = tiny(), prompts(60, 60)
        with qevict.attach(model, policies.evict_only("50 %")) as session:
            cache = session.prefill(ids)
            mask = torch.ones(2, 61, dtype=torch.long)
            mask[0, -1] = 0
            model(ids[:, :1], attention_mask=mask, **{CACHE_ARGUMENT: cache})
            for _ in range(6):
                model(ids[:, :1], **{CACHE_ARGUMENT: cache})
            with pytest.raises(errors.InputError, match="mask hides tokens"):
                model(ids[:, :1], **{CACHE_ARGUMENT: cache})

    @torch.no_grad()
    def test_a_mask_that_hides_old_tokens(self) -> None:
        model, (ids, _) = tiny(), prompts(60, 60)
        with qevict.attach(model, policies.evict_only("50 %")) as session:
            cache = session.prefill(ids)
            mask = torch.ones(2, 65, dtype=torch.long)
            mask[0, 20:30] = 0
            with pytest.raises(errors.InputError, match="mask hides tokens"):
                model(ids[:, :5], attention_mask=mask, **{CACHE_ARGUMENT: cache})

    def test_embeddings_in_place_of_ids(self) -> None:
        model, (ids, _) = tiny(), prompts(60)
        embeds = model.get_input_embeddings()(ids).detach()
        with qevict.attach(model, policies.evict_only("50 %")) as session:
            found = session.generate(inputs_embeds=embeds, **ASK)
            assert torch.equal(found, session.generate(ids, **ASK)[:, 60:])
            with pytest.raises(errors.InputError, match="input_ids or inputs_embeds"):
                session.generate(**ASK)

    @torch.no_grad()
    def test_a_cache_given_to_another_model_can_still_be_used_with_its_own(self) -> None:
        model, other, (ids, _) = tiny(), tiny(seed=1), prompts(60)
        with qevict.attach(model, policies.evict_only("50 %")) as session:
            cache = session.prefill(ids)
            with pytest.raises(errors.NotAttachedError):
                other(ids[:, :1], **{CACHE_ARGUMENT: cache})
            model(ids[:, :1], **{CACHE_ARGUMENT: cache})
        assert cache.get_seq_length() == 61

    @pytest.mark.parametrize(
        ("method", "answer", "words"),
        [
            ("rank", lambda seen: {"importance": seen.positions}, "must rank in float32"),
            ("rank", lambda seen: seen.positions.float(), "rankings by name.*got a Tensor"),
            ("rank", lambda _: {}, "no ranking"),
            ("update", lambda seen: seen.keys, "a state with the names that it starts with.*got a Tensor"),
            ("update", lambda seen: {"sum": seen.keys.sum()}, r"\['norm'\]; got \['sum'\]"),
            ("update", lambda seen: {"norm": torch.zeros(1, seen.windows).half()}, "state in float32.*float16"),
            ("update", lambda seen: {"norm": torch.zeros(seen.windows)}, r"over lanes and windows, shaped \(1, "),
        ],
    )
    @pytest.mark.usefixtures("unchecked")
    def test_answers_of_a_scorer_that_break_its_contract(self, method: str, answer: Any, words: str) -> None:
        def says(_self: object, _state: object, seen: Any) -> Any:
            return answer(seen)

        model, (ids, _) = tiny(), prompts(60)
        scorer = attrs.frozen(type("Odd", (KeyNorm,), {method: says}))()
        policy = attrs.evolve(policies.evict_only("50 %"), scorer=scorer)
        with (
            pytest.raises(errors.ContractError, match=f"scorer 'key_norm'.*{words}"),
            qevict.attach(model, policy) as session,  # where rankings are looked at already
        ):
            session.prefill(ids)

    @pytest.mark.parametrize("ids", [[1, 2], torch.tensor([1, 2]), torch.ones(1, 4), torch.ones(1, 0).long(), None])
    @pytest.mark.usefixtures("unchecked")
    def test_what_are_no_ids(self, ids: Any) -> None:
        model = tiny()
        with qevict.attach(model, policies.full()) as session:
            for read in (session.prefill, session.record, session.generate):
                with pytest.raises(errors.InputError):
                    read(ids)

    def test_a_refused_input_leaves_the_cache_usable(self) -> None:
        model, (ids, _) = tiny(), prompts(60)
        with qevict.attach(model, policies.full()) as session, torch.no_grad():
            cache = session.cache()
            with pytest.raises(errors.InputError):
                model(ids, position_ids=torch.arange(60)[None] * 2, **{CACHE_ARGUMENT: cache})
            model(ids, **{CACHE_ARGUMENT: cache})
        assert cache.get_seq_length() == 60


class TestRefusals:
    """Typed, early, with the remedy, and the model untouched."""

    @pytest.mark.parametrize(
        ("model", "reason"),
        [
            (
                GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=97)).eval(),
                "'gpt2' is not supported",
            ),
            (
                T5ForConditionalGeneration(T5Config(num_layers=1, d_model=32, d_kv=8, d_ff=32, num_heads=2)).eval(),
                "encoder-decoder",
            ),
            (small(LlamaForCausalLM, LlamaConfig).train(), "training mode"),
            (torch.nn.Linear(2, 2), "a policy attaches to a transformers model"),
        ],
        ids=["gpt2", "t5", "training", "no-model"],
    )
    def test_models(self, model: Any, reason: str) -> None:
        before = getattr(getattr(model, "config", None), "_attn_implementation", None)
        with pytest.raises(errors.UnsupportedModelError, match=reason), qevict.attach(model, policies.full()):
            pytest.fail("attached")
        assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before

    def test_a_head_dim_that_does_not_pack(self) -> None:
        model = tiny(num_hidden_layers=1, head_dim=6)
        policy = policies.qevict("40 %", bits=3, window_tokens=2)
        with pytest.raises(errors.PolicyError, match="multiple of 8"), qevict.attach(model, policy):
            pytest.fail("attached")

    def test_a_cache_without_attach(self) -> None:
        model, (ids, _) = tiny(), prompts(20)
        with pytest.raises(errors.NotAttachedError, match="attach"):
            qevict.Cache(model, policies.full())
        with qevict.attach(model, policies.full()) as session:
            cache = session.cache()
        calls: list[int] = []
        handle = model.base_model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: calls.append(1))
        with pytest.raises(errors.NotAttachedError, match="attach"):
            model(ids, **{CACHE_ARGUMENT: cache})
        handle.remove()
        assert not calls, "nothing was attended to"
        assert cache.get_seq_length() == 0

    @pytest.mark.parametrize(
        ("how", "reason"),
        [
            ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
            ({"assistant_model": object()}, "assistant_model"),
            ({"past_key_values": object()}, "cache="),
            ({"use_cache": False}, "use_cache"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_ways_to_generate(self, how: dict[str, Any], reason: str) -> None:
        model, (ids, _) = tiny(), prompts(20)
        with (
            qevict.attach(model, policies.full()) as session,
            pytest.raises(errors.UnsupportedOperationError, match=reason),
        ):
            session.generate(ids, **ASK, **how)

    @pytest.mark.parametrize("how", ["lookup", "assistant"])
    def test_assisted_decoding_with_a_cache_of_ones_own(self, how: str) -> None:
        model, (ids, _) = tiny(), prompts(20)
        own = {"assistant_model": tiny(num_hidden_layers=1)} if how == "assistant" else {"prompt_lookup_num_tokens": 3}
        policy = policies.evict_only("50 %")
        with qevict.attach(model, policy), pytest.raises(errors.UnsupportedOperationError, match="assisted decoding"):
            model.generate(ids, **ASK, **own, **{CACHE_ARGUMENT: (cache := qevict.Cache(model, policy))})
        assert not cache.get_seq_length()
        assert not cache.is_croppable

    def test_right_padding_masks_of_ones_own_and_strange_positions(self) -> None:
        model, (ids, _) = tiny(), prompts(20, 20)
        right = torch.ones_like(ids)
        right[0, 15:] = 0
        empty = torch.ones_like(ids)
        empty[0] = 0
        square = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
        jump = torch.arange(20).repeat(2, 1)
        jump[1, 10:] += 5
        for inputs, reason in (
            ({"attention_mask": right}, "left"),
            ({"attention_mask": empty}, "no real token"),
            ({"attention_mask": square}, "4-D"),
            ({"position_ids": jump}, "count up by one"),
        ):
            with qevict.attach(model, policies.full()) as session, pytest.raises(errors.InputError, match=reason):
                model(ids, **inputs, **{CACHE_ARGUMENT: session.cache()})

    @torch.no_grad()
    def test_positions_that_jump_while_decoding(self) -> None:
        model, (ids, _) = tiny(), prompts(60)
        with qevict.attach(model, policies.evict_only("50 %")) as session:
            cache = session.prefill(ids)
            for position in (60, 61, 62, 63, 65, 66, 67):
                model(ids[:, :1], position_ids=torch.tensor([[position]]), **{CACHE_ARGUMENT: cache})
            with pytest.raises(errors.InputError, match="count up by one"):
                model(ids[:, :1], position_ids=torch.tensor([[68]]), **{CACHE_ARGUMENT: cache})

    def test_another_batch(self) -> None:
        model, (ids, _) = tiny(), prompts(20)
        with qevict.attach(model, policies.full()) as session:
            cache = session.prefill(ids)
            with pytest.raises(errors.InputError, match="rows"):
                session.generate(ids.repeat(2, 1), cache=cache, **ASK)

    def test_changes_of_one_layer_alone(self) -> None:
        model, (ids, _) = tiny(), prompts(20)
        with qevict.attach(model, policies.full()) as session:
            cache: Any = session.prefill(ids)
        for name, arguments in (
            ("crop", (-1,)),
            ("reorder_cache", (torch.tensor([0]),)),
            ("batch_repeat_interleave", (2,)),
            ("batch_select_indices", (torch.tensor([0]),)),
            ("reset", ()),
        ):
            with pytest.raises(errors.UnsupportedOperationError, match="all its layers together"):
                getattr(cache.layers[0], name)(*arguments)

    def test_a_prompt_announced_too_late(self) -> None:
        model, (ids, _) = tiny(), prompts(20)
        with qevict.attach(model, policies.full()) as session:
            cache = session.prefill(ids)
        with pytest.raises(errors.UnsupportedOperationError, match="before the first forward"):
            cache.expect(3)


def test_import_is_quiet() -> None:
    """`import qevict` loads neither torch nor transformers; touching `attach` does."""
    code = (
        "import sys, qevict\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "qevict.policies\nassert 'transformers' not in sys.modules\n"
        "qevict.attach\nassert 'transformers' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_presets_show_in_the_cache() -> None:
    """What rules a cache can be read off it."""
    model, (ids, _) = tiny(), prompts(20)
    policy = attrs.evolve(policies.qevict("40 %"), min_tokens=3)
    with qevict.attach(model, policy) as session:
        cache = session.prefill(ids)
    assert cache.policy == policy
    assert "20 tokens seen" in repr(cache)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_policy_is_refused() -> None:
    model: Any = tiny()
    for wrong in ("qevict", None, policies.qevict):
        with pytest.raises(errors.PolicyError, match="a policy is wanted"), qevict.attach(model, cast("Any", wrong)):
            pass
