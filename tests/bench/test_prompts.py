"""The demo's prompts: the cut behind the document, further turns, and what the full cache answers."""

import copy
from typing import Any

import attrs
import pytest
import torch
from tests.chat import TEMPLATE, byte_tokenizer
from transformers import DynamicCache, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qevict.bench import models, prompts
from qevict.errors import ModelError
from qevict.hf.compat import CACHE_ARGUMENT


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(merges=[("Ċ", "Ċ")])


def test_both_parts_together_are_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    context, question = prompts.split_prompt(tokenizer, " A café.\nTwo.\n", "Who?\n")
    assert tokenizer.decode(context) == "<user>A café.\nTwo.\n\n"
    assert tokenizer.decode(question) == "Who?</s><assistant>"


def test_a_further_turn_closes_the_reply(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.decode(prompts.next_turn(tokenizer, "Why?")) == "</s><user>Why?</s><assistant>"


def test_the_answer_is_cut_behind_its_lead_in(tokenizer: PreTrainedTokenizerFast) -> None:
    asked = prompts.Question("Who?", "Ann", 0.5, lead_in="It was")
    lead, answer = prompts.reply_ids(tokenizer, asked)
    assert (tokenizer.decode(lead), tokenizer.decode(answer)) == ("It was", " Ann")
    assert prompts.reply_ids(tokenizer, attrs.evolve(asked, lead_in="")) == ([], prompts.answer_ids(tokenizer, "Ann"))


@pytest.mark.parametrize(
    ("template", "merges", "expected"),
    [
        (None, [], "has no chat template"),
        (TEMPLATE.replace("m['content']", "m['content'] | upper"), [], "alters the message"),
        (TEMPLATE, [("Ċ", "W")], "joins the blank line"),
    ],
    ids=["no-template", "altering-template", "joining-tokenizer"],
)
def test_an_unfit_tokenizer_is_refused(template: str | None, merges: list[tuple[str, str]], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        prompts.split_prompt(byte_tokenizer(template, merges=merges), "a text", "Who?")


def test_a_template_without_memory_is_refused() -> None:
    forgetful = byte_tokenizer("{{ messages[-1]['content'] }}", merges=[])
    with pytest.raises(ModelError, match="drops earlier replies"):
        prompts.next_turn(forgetful, "Who?")


@pytest.mark.parametrize(("document", "question"), [("  ", "Who?"), ("text", "\n")])
def test_empty_parts_are_refused(tokenizer: PreTrainedTokenizerFast, document: str, question: str) -> None:
    with pytest.raises(ValueError, match="at least one visible character"):
        prompts.split_prompt(tokenizer, document, question)


def test_each_answer_stands_once_at_the_depth_that_is_claimed() -> None:
    text, questions = prompts.load_document().text, prompts.load_questions()
    assert len(questions) >= 6
    for asked in questions:
        assert text.count(asked.answer) == 1
        assert text.index(asked.answer) / len(text) == pytest.approx(asked.depth, abs=0.02)
        assert asked.answer not in asked.question + asked.lead_in
        assert asked.is_answered_by(f"I think it is {asked.answer.upper()}.")
        assert not asked.is_answered_by("I do not know.")


def test_the_demo_pair_asks_about_two_parts() -> None:
    first, second = prompts.load_questions()[:2]
    assert abs(first.depth - second.depth) > 0.3


def test_values_are_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        prompts.load_document().text = ""  # type: ignore[misc]


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, PreTrainedTokenizerBase]:
    return models.load()


@torch.inference_mode()
def reply(model: Any, tokenizer: PreTrainedTokenizerBase, ids: list[int], cache: DynamicCache) -> str:
    """Continue a cache greedily for 48 tokens, or to the end of the turn."""
    said: list[int] = []
    while len(said) < 48:
        logits = model(torch.tensor([ids]), logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits
        ids = [int(logits[0, -1].argmax())]
        if ids == [tokenizer.eos_token_id]:
            break
        said += ids
    return str(tokenizer.decode(said))


@pytest.mark.real
def test_real_context_is_the_same_for_every_question(smollm2: tuple[Any, PreTrainedTokenizerBase]) -> None:
    _, tokenizer = smollm2
    document = prompts.load_document().text
    contexts = set()
    for asked in prompts.load_questions():
        context, rest = prompts.split_prompt(tokenizer, document, asked.question)
        message = [{"role": "user", "content": f"{document}\n\n{asked.question}"}]
        whole = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        assert context + rest == tokenizer(whole, add_special_tokens=False)["input_ids"]
        contexts.add(tuple(context))
    assert len(contexts) == 1
    assert 850 <= len(prompts.answer_ids(tokenizer, document)) <= 950


@pytest.mark.real
@pytest.mark.slow
def test_real_full_cache_answers_and_so_does_the_second_turn(smollm2: tuple[Any, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = smollm2
    text, questions = prompts.load_document().text, prompts.load_questions()
    splits = [prompts.split_prompt(tokenizer, text, asked.question) for asked in questions]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([splits[0][0]]), logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    replies = [reply(model, tokenizer, ids, copy.deepcopy(cache)) for _, ids in splits]
    right = [asked.is_answered_by(said) for asked, said in zip(questions, replies, strict=True)]
    assert sum(right) >= 5, replies
    assert right[0], replies[0]

    first_turn = splits[0][1] + prompts.answer_ids(tokenizer, replies[0])
    second = reply(model, tokenizer, first_turn + prompts.next_turn(tokenizer, questions[1].question), cache)
    assert questions[1].is_answered_by(second), second
