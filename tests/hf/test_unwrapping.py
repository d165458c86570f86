"""Models that other libraries have wrapped: the policy rules the model inside, and what is around it still counts."""

from typing import Any

import peft
import pytest
import torch
from tests.oracle import prompts, tiny
from tests.wrapped import with_lora

import qevict
from qevict import errors, policies
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.hf.unwrapping import unwrap

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it

ASK: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
POLICY = policies.qevict("40 %")


class TestPeft:
    """Adapters of weights work, merged or not; adapters that bring tokens are refused."""

    def test_an_adapter_counts_in_generate_prefill_and_record(self) -> None:
        (ids, mask), plain = prompts(30, 60), tiny(num_hidden_layers=2)
        adapted = with_lora(tiny(num_hidden_layers=2))
        assert not torch.equal(plain.generate(ids, **ASK), adapted.generate(input_ids=ids, **ASK))
        merged = with_lora(tiny(num_hidden_layers=2)).merge_and_unload()
        found = []
        for model in (adapted, merged):
            with qevict.attach(model, POLICY) as session:
                cache = session.prefill(ids, mask)
                played = session.cache()
                session.record(ids, mask).play_into(played)
                found.append(
                    [
                        session.generate(ids, attention_mask=mask, **ASK),
                        session.generate(ids[:, :7], cache=cache, **ASK),
                        session.generate(ids[:, :7], cache=played, **ASK),
                        model.generate(input_ids=ids, attention_mask=mask, **ASK, **{CACHE_ARGUMENT: session.cache()}),
                    ]
                )
        for own, theirs in zip(*found, strict=True):
            assert torch.equal(own, theirs)
        assert torch.equal(found[0][1], found[0][2])

    def test_the_model_is_as_it_was_afterwards(self) -> None:
        ids, _ = prompts(40)
        model = with_lora(tiny())
        expected, before = model.generate(input_ids=ids, **ASK), set(vars(unwrap(model)))
        with qevict.attach(model, POLICY) as session:
            assert session.model is model
            session.generate(ids, **ASK)
        assert model.config._attn_implementation == "sdpa"
        assert set(vars(unwrap(model))) - {"prepare_inputs_for_generation"} <= before
        assert torch.equal(model.generate(input_ids=ids, **ASK), expected)

    @pytest.mark.parametrize(
        "config",
        [
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1),
        ],
        ids=lambda config: config.peft_type.value,
    )
    def test_adapters_that_bring_tokens(self, config: Any) -> None:
        model = peft.get_peft_model(tiny(), config).eval()
        with pytest.raises(errors.UnsupportedModelError, match=config.peft_type.value), qevict.attach(model, POLICY):
            pytest.fail("attached")
        assert model.config._attn_implementation == "sdpa"


class TestCompiledModule:
    """``torch.compile(model)`` stands around the model."""

    def test_it_is_served_as_the_model_inside(self) -> None:
        model, (ids, _) = tiny(), prompts(60)
        with qevict.attach(model, POLICY) as session:
            expected = session.generate(ids, **ASK)
        wrapped: Any = torch.compile(with_lora(model), backend="eager")
        assert unwrap(wrapped) is model
        wrapped = torch.compile(tiny(), backend="eager")
        with qevict.attach(wrapped, POLICY) as session:
            assert qevict.Cache(wrapped, POLICY).get_seq_length() == 0
            assert torch.equal(session.generate(ids, **ASK), expected)
        assert wrapped.config._attn_implementation == "sdpa"
