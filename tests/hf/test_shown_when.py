"""When a scorer is shown something, and what is refused before it is."""

import attrs
import pytest
import torch
from tests.engine.test_observing import Spy, spying
from tests.oracle import prompts, tiny
from torch import Tensor

import qevict
from qevict.contracts.values import Need
from qevict.errors import InputError, PolicyError, UnsupportedOperationError
from qevict.policies import evict_only
from qevict_baselines.kvzip import kvzip
from qevict_baselines.streaming_llm import streaming_llm

LAYERS = 2
BY_QUERY = frozenset({Need.MASS, Need.MASS_BY_QUERY})


def decoded_under(spy: Spy, **options: object) -> int:
    """How many observations the prompt made; ten tokens follow."""
    ids = prompts(40)[0]
    with qevict.attach(tiny(num_hidden_layers=LAYERS), spying(spy, **options)) as session:
        cache = session.prefill(ids)
        prompt = len(spy.seen)
        session.generate(ids[:, :1], cache=cache, max_new_tokens=10)
    return prompt


def test_single_queries_are_shown_once_and_masses_go_on() -> None:
    spy = Spy(needs=BY_QUERY)
    assert decoded_under(spy) == LAYERS
    assert [each.mass_by_query is not None for each in spy.seen] == [True] * LAYERS + [False] * 10
    masses = [each.mass for each in spy.seen]
    lanes = [mass.shape[0] for mass in masses if mass is not None]
    assert lanes == [lanes[0]] * LAYERS + [lanes[0] * LAYERS] * 10


def test_a_policy_that_compresses_once_looks_at_nothing_more() -> None:
    spy = Spy(needs=BY_QUERY)
    assert decoded_under(spy, route_at="prompt") == len(spy.seen) == LAYERS


def test_a_row_shorter_than_the_sinks_turns_by_no_other_rows_gap() -> None:
    model, policy = tiny(num_hidden_layers=LAYERS), streaming_llm("30 %")
    ids, mask = prompts(2, 60)

    def logits(ids: Tensor, mask: Tensor | None) -> Tensor:
        with qevict.attach(model, policy) as session:
            cache = session.prefill(ids, mask)
            new = {"max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True, "do_sample": False}
            return torch.stack(session.generate(ids[:, -1:], cache=cache, **new).logits)

    torch.testing.assert_close(logits(ids, mask)[:, 0], logits(ids[:1, -2:], None)[:, 0], atol=1e-4, rtol=1e-4)


def test_an_instruction_of_another_tokenizer_is_refused_before_a_token() -> None:
    with (
        qevict.attach(tiny(num_hidden_layers=1), kvzip("50 %", instruction=(3, 9999))) as session,
        pytest.raises(InputError, match="token id 9999, the model knows 97"),
    ):
        session.prefill(prompts(20)[0])


def test_a_row_with_nothing_to_repeat_is_refused() -> None:
    ids, mask = prompts(20, 20)
    mask[0] = 0
    with (
        qevict.attach(tiny(num_hidden_layers=1), kvzip("50 %")) as session,
        pytest.raises(InputError, match="no real token"),
    ):
        session.prefill(ids, mask)


def test_what_cannot_be_repeated_is_refused_before_local_layers_take_it() -> None:
    with qevict.attach(tiny("gemma3"), kvzip("50 %")) as session:
        cache = session.cache()
        with pytest.raises(UnsupportedOperationError, match=r"session\.prefill"):
            session.generate(prompts(20)[0], cache=cache, max_new_tokens=2)
        assert {cache.get_seq_length(layer) for layer in range(len(cache.layers))} == {0}


def test_events_are_forgotten_once_a_repeated_prompt_was_compressed() -> None:
    with qevict.attach(tiny(num_hidden_layers=LAYERS), kvzip("40 %")) as session:
        cache = session.prefill(prompts(60)[0])
    assert not cache.engine.whole
    assert cache.engine.clock.events == ()


@pytest.mark.parametrize("need", [Need.POSITIONS, Need.FIRST_LOOKS, Need.ROTARY, Need.OUTPUT_PROJECTION])
def test_needs_that_show_nothing_alone_are_refused(need: Need) -> None:
    with pytest.raises(PolicyError, match=f"needs {need.value}, which is shown beside something else only"):
        spying(Spy(needs=frozenset({need})))


@pytest.mark.parametrize("need", [Need.MASS_BY_QUERY, Need.QUERIES, Need.PROMPT, Need.HELD])
def test_a_reconstruction_takes_the_place_of_the_prompts_end(need: Need) -> None:
    scorer = kvzip("50 %").scorer
    asks_both = attrs.evolve(Spy(needs=scorer.needs | {need}), repeats=scorer.repeats)
    with pytest.raises(PolicyError, match=r"a reconstruction.*give up one of them"):
        attrs.evolve(evict_only("50 %"), scorer=asks_both)
