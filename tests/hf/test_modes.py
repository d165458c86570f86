"""What cannot be honoured is refused before anything is computed, with the reason, and leaves the cache usable."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import prompts, tiny
from transformers import GenerationConfig

import qevict
from qevict import errors, policies
from qevict.hf.compat import CACHE_ARGUMENT

ASK: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
POLICY = policies.evict_only("50 %")


def forwards_of(model: Any) -> list[int]:
    """Grows with every attention output that the model computes."""
    calls: list[int] = []
    model.base_model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: calls.append(1))
    return calls


class TestOptionsOfGenerate:
    """Given to the call, in a generation config, or left in the model's own."""

    OPTIONS = (
        ("assistant_model", object(), "cannot come back"),
        ("assistant_early_exit", 1, "cannot come back"),
        ("prompt_lookup_num_tokens", 3, "cannot come back"),
        ("penalty_alpha", 0.6, "code from the Hub"),
        ("dola_layers", "high", "code from the Hub"),
        ("num_beam_groups", 2, "code from the Hub"),
        ("constraints", [object()], "code from the Hub"),
        ("force_words_ids", [[3]], "code from the Hub"),
        ("custom_generate", "someone/something", "code from the Hub"),
        ("cache_implementation", "static", "the policy decides"),
        ("cache_implementation", "offloaded", "the policy decides"),
        ("cache_implementation", "quantized", "the policy decides"),
        ("cache_implementation", "paged", "the policy decides"),
        ("use_cache", False, "call model.generate instead"),
        ("past_key_values", object(), "as cache="),
    )

    @pytest.mark.parametrize(
        ("name", "value", "reason"), OPTIONS, ids=[f"{name}-{number}" for number, (name, *_) in enumerate(OPTIONS)]
    )
    def test_given_to_the_call(self, name: str, value: object, reason: str) -> None:
        model, (ids, _) = tiny(num_hidden_layers=1), prompts(20)
        calls = forwards_of(model)
        with qevict.attach(model, POLICY) as session:
            cache = session.cache()
            with pytest.raises(errors.UnsupportedOperationError, match=f"{name}.*{reason}|{reason}"):
                session.generate(ids, cache=cache, **ASK, **{name: value})
            assert not calls
            assert session.generate(ids, cache=cache, **ASK).shape == (1, 24)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("prompt_lookup_num_tokens", 3), ("dola_layers", "high"), ("cache_implementation", "static")],
    )
    def test_in_a_generation_config(self, name: str, value: object) -> None:
        model, (ids, _) = tiny(num_hidden_layers=1), prompts(20)
        with qevict.attach(model, POLICY) as session:
            with pytest.raises(errors.UnsupportedOperationError, match=name):
                session.generate(ids, generation_config=GenerationConfig(**ASK | {name: value}))
            setattr(model.generation_config, name, value)
            with pytest.raises(errors.UnsupportedOperationError, match=name):
                session.generate(ids, **ASK)

    def test_a_config_without_any_of_them(self) -> None:
        model, (ids, _) = tiny(num_hidden_layers=1), prompts(20)
        with qevict.attach(model, POLICY) as session:
            config = GenerationConfig(**ASK, pad_token_id=0)
            assert torch.equal(session.generate(ids, generation_config=config), session.generate(ids, **ASK))

    def test_a_generation_loop_of_ones_own(self) -> None:
        """It is handed the cache, and the cache says what it cannot do."""
        model, (ids, _) = tiny(num_hidden_layers=1), prompts(20)
        found: list[Any] = []

        def loop(_model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            found.append(kwargs[CACHE_ARGUMENT])
            return input_ids

        with qevict.attach(model, POLICY) as session:
            cache = session.cache()
            session.generate(ids, cache=cache, custom_generate=loop, **ASK)
        assert found == [cache]


class TestContinuousBatching:
    """It keeps keys and values in pages of its own."""

    @pytest.mark.parametrize("impl", ["sdpa", "eager"])
    def test_every_way_in_is_refused_while_attached(self, impl: str) -> None:
        model, (ids, _) = tiny(impl=impl, num_hidden_layers=1), prompts(20)
        before = dict(vars(model))
        with qevict.attach(model, POLICY), qevict.attach(model, policies.full()):
            pass
        with qevict.attach(model, POLICY):
            with qevict.attach(model, policies.full()):
                pass
            ways: tuple[Callable[[], Any], ...] = (
                model.init_continuous_batching,
                lambda: model.generate_batch([[3, 4, 5]], max_new_tokens=2, progress_bar=False),
                lambda: model.generate(ids, cache_implementation="paged", **ASK),
            )
            for start in ways:
                with pytest.raises(errors.UnsupportedOperationError, match=r"continuous batching.*outside"):
                    start()
            assert model.config._attn_implementation == f"qevict_{impl}"
        assert vars(model) == before


class TestModesOfTheModel:
    """Inference only."""

    @torch.no_grad()
    def test_training_mode_begun_while_attached(self) -> None:
        model, (ids, _) = tiny(num_hidden_layers=2), prompts(20)
        with qevict.attach(model, POLICY) as session:
            calls, cache = forwards_of(model), session.cache()
            model.train()
            for start in (
                lambda: model(ids, **{CACHE_ARGUMENT: cache}),
                lambda: session.prefill(ids),
                lambda: session.record(ids),
                lambda: session.generate(ids, **ASK),
            ):
                with pytest.raises(errors.UnsupportedModelError, match=r"training mode.*model\.eval\(\)"):
                    start()
            assert not calls
            model.eval()
            model(ids, **{CACHE_ARGUMENT: cache})
        assert cache.get_seq_length() == 20

    @pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # both names, one on each end
    def test_gradient_checkpointing_counts_in_training_only(self) -> None:
        model, (ids, _) = tiny(num_hidden_layers=2), prompts(60)
        with qevict.attach(model, POLICY) as session:
            expected = session.generate(ids, **ASK)
        model.gradient_checkpointing_enable()
        with qevict.attach(model, POLICY) as session:
            assert torch.equal(session.generate(ids, **ASK), expected)
        with pytest.raises(errors.UnsupportedModelError, match="training"), qevict.attach(model.train(), POLICY):
            pytest.fail("attached")

    @torch.no_grad()
    def test_a_forward_or_generate_that_would_not_use_the_cache(self) -> None:
        model, (ids, _) = tiny(num_hidden_layers=1), prompts(20)
        calls = forwards_of(model)
        with qevict.attach(model, POLICY) as session:
            cache = session.cache()
            for start, how in ((model, {}), (model.generate, ASK)):
                with pytest.raises(errors.UnsupportedOperationError, match="drop use_cache"):
                    start(ids, use_cache=False, **how, **{CACHE_ARGUMENT: cache})
            assert not calls
            assert torch.equal(session.generate(ids, cache=cache, **ASK), session.generate(ids, **ASK))


class TestInputsOfGenerate:
    """Pads on the left, positions that count up."""

    @pytest.mark.filterwarnings("ignore:.*right-padding:UserWarning")
    def test_right_padding_and_positions_of_ones_own(self) -> None:
        model, (ids, _) = tiny(num_hidden_layers=1), prompts(20, 20)
        right, jump = torch.ones_like(ids), torch.arange(20).repeat(2, 1)
        right[0, 15:] = 0
        jump[1, 10:] += 5
        calls = forwards_of(model)
        with qevict.attach(model, POLICY) as session:
            with pytest.raises(errors.InputError, match="left"):
                session.generate(ids, attention_mask=right, **ASK)
            with pytest.raises(errors.InputError, match="count up by one"):
                session.generate(ids, position_ids=jump, **ASK)
            with pytest.raises(errors.InputError, match="left"):
                session.prefill(ids, right)
        assert not calls
