"""The hidden facts: where they stand, that only they answer, and how long the prompts become."""

import json
import re
from collections import Counter
from importlib import resources
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from qevict.bench import models, needles, prompts
from qevict.bench.needles import Needle, document, load_haystack, load_needles

DATA = resources.files("qevict.bench") / "data"
NEEDLES = load_needles()
HAYSTACKS = sorted({needle.haystack for needle in NEEDLES})

each_needle = pytest.mark.parametrize("needle", NEEDLES, ids=lambda needle: needle.asked.answer)


def test_twelve_texts_hide_four_facts_each() -> None:
    assert len(NEEDLES) == 48
    assert list(Counter(needle.haystack for needle in NEEDLES).values()) == [4] * 12
    assert len({needle.asked.answer.casefold() for needle in NEEDLES}) == 48
    assert len({needle.fact for needle in NEEDLES}) == 48


def test_depths_are_even_over_all_needles_and_within_each_text() -> None:
    def even(depths: list[float]) -> bool:
        return sorted(depths) == pytest.approx([(place + 0.5) / 48 for place in range(48)], abs=0.0006)

    assert even([needle.asked.depth for needle in NEEDLES])
    for name in HAYSTACKS:
        first, *others = sorted(needle.asked.depth for needle in NEEDLES if needle.haystack == name)
        assert others == pytest.approx([first + quarter / 4 for quarter in (1, 2, 3)], abs=0.0011)


@pytest.mark.parametrize("count", [4, 8, 12, 16, 24, 36])
def test_the_first_needles_are_a_fair_sample(count: int) -> None:
    sample = NEEDLES[:count]
    uses = Counter(needle.haystack for needle in sample)
    assert len(uses) == min(count, 12)
    assert max(uses.values()) - min(uses.values()) <= 1
    depths = sorted(needle.asked.depth for needle in sample)
    gaps = [after - before for before, after in zip([0.0, *depths], [*depths, 1.0], strict=True)]
    assert max(gaps) < 2 / count


@each_needle
def test_the_fact_is_all_that_is_added_and_stands_between_two_sentences(needle: Needle) -> None:
    text, hidden = load_haystack(needle.haystack), document(needle)
    before, fact, after = hidden.partition(f" {needle.fact}")
    assert fact
    assert before + after == text
    assert hidden.count(needle.fact) == 1
    assert re.search(r"[.!?]$", before)
    assert re.match(r'\s+["A-Z]', after)
    assert re.fullmatch(r"[A-Z][^.!?]*\.", needle.fact)


@each_needle
def test_the_fact_stands_at_its_depth(needle: Needle) -> None:
    text, hidden = load_haystack(needle.haystack), document(needle)
    longest = max(map(len, re.split(r"(?<=[.!?])\s+", text)))
    assert abs(hidden.index(needle.fact) - 1 - needle.asked.depth * len(text)) <= longest / 2 + 2


@each_needle
def test_only_the_fact_gives_the_answer(needle: Needle) -> None:
    asked = needle.asked
    assert asked.answer in needle.fact
    assert document(needle).casefold().count(asked.answer.casefold()) == 1
    assert asked.answer.casefold() not in f"{asked.question} {asked.lead_in}".casefold()
    assert asked.question.endswith("?")
    assert asked.lead_in
    assert asked.lead_in == asked.lead_in.strip()
    assert 1 <= len(asked.answer.split()) <= 3


@pytest.mark.parametrize("name", HAYSTACKS)
def test_texts_are_plain_prose(name: str) -> None:
    raw = (DATA / "haystacks" / f"{name}.txt").read_bytes()
    assert raw.isascii()
    assert raw.endswith(b".\n")
    assert 650 <= len(raw.split()) <= 800
    assert not re.search(r"[ \t]\n|  |\n{3}|\d", raw.decode())
    sentences = re.split(r"(?<=[.!?])\s+", raw.decode().strip())
    assert len(set(sentences)) == len(sentences)


def test_every_text_is_used_and_the_list_is_plain() -> None:
    assert sorted(path.name for path in (DATA / "haystacks").iterdir()) == [f"{name}.txt" for name in HAYSTACKS]
    raw = (DATA / "needles.json").read_bytes()
    assert raw.isascii()
    assert raw.endswith(b"]\n")
    assert len(json.loads(raw)) == 48


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, PreTrainedTokenizerBase]:
    return models.load()


@pytest.mark.real
def test_real_prompts_have_the_length_that_is_claimed(smollm2: tuple[Any, PreTrainedTokenizerBase]) -> None:
    _, tokenizer = smollm2
    for needle in NEEDLES:
        context, question = prompts.split_prompt(tokenizer, document(needle), needle.asked.question)
        lead, answer = prompts.reply_ids(tokenizer, needle.asked)
        assert 800 <= len(context) + len(question) <= 1200
        assert lead
        assert 2 <= len(answer) <= 6


@torch.inference_mode()
def nats(model: Any, tokenizer: PreTrainedTokenizerBase, text: str, asked: prompts.Question) -> float:
    context, question = prompts.split_prompt(tokenizer, text, asked.question)
    lead, answer = prompts.reply_ids(tokenizer, asked)
    ids = torch.tensor([[*context, *question, *lead, *answer]])
    logits = model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer)))


@pytest.mark.real
@pytest.mark.parametrize(
    "needle",
    [pytest.param(needle, marks=pytest.mark.exhaustive if place >= 4 else ()) for place, needle in enumerate(NEEDLES)],
)
def test_real_the_answer_is_known_with_the_fact_and_not_without(
    smollm2: tuple[Any, PreTrainedTokenizerBase], needle: Needle
) -> None:
    model, tokenizer = smollm2
    assert nats(model, tokenizer, document(needle), needle.asked) < 0.5
    assert nats(model, tokenizer, needles.load_haystack(needle.haystack), needle.asked) > 1.5
