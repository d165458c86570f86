"""The zoo's prompts: answers stand in the text, nothing changes between runs, cuts fall where they are said to."""

import itertools
from typing import Any

import pytest
from tests.chat import TEMPLATE, byte_tokenizer

from qevict.bench.models import load
from qevict.bench.zoo.prompts import NEXT_TOKENS, SEEN, UNSEEN, Piece, Prompt, read
from qevict.bench.zoo.tasks import PERPLEXITY, RETRIEVAL, TASKS
from qevict.bench.zoo.texts import running_texts, words
from qevict.errors import ModelError

LENGTHS = (("900", 48), ("3000", 6))
ONCE = (*RETRIEVAL, "aggregation", "multi-hop")


def tokenizer() -> Any:
    return byte_tokenizer(TEMPLATE, merges=[("Ċ", "Ċ")])


@pytest.mark.parametrize(("length", "count"), LENGTHS)
@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_as_many_as_asked_for_and_always_the_same(task: str, length: str, count: int) -> None:
    prompts = list(TASKS[task](length, count))
    assert len(prompts) == len({prompt.text for prompt in prompts}) == count
    assert [prompt.place for prompt in prompts] == list(range(count))
    assert list(TASKS[task](length, 2)) == prompts[:2], "more prompts change the first ones"
    assert all("/" not in prompt.task for prompt in prompts), "keys are taken apart at slashes"


@pytest.mark.parametrize(("length", "count"), LENGTHS)
@pytest.mark.parametrize("task", ONCE)
def test_answers_stand_in_the_text_and_only_once(task: str, length: str, count: int) -> None:
    for prompt in TASKS[task](length, count):
        for piece in prompt.reply:
            if piece.scored:
                answer = f"{piece.text}." if task == "aggregation" else piece.text
                found = prompt.text.count(answer)
                assert found == (2 if piece.text[1:] in words("people") else 1), (prompt.key, piece.text, found)


def test_one_word_is_the_most_common_and_one_day_differs() -> None:
    for prompt in itertools.chain(TASKS["common words"]("900", 48), TASKS["common words"]("3000", 6)):
        listed = prompt.text.removeprefix("Here is a list of words: ").removesuffix(".").split(", ")
        counts = sorted((listed.count(word), f" {word}") for word in set(listed))
        assert counts[-1][1] == prompt.answer
        assert counts[-1][0] > 9 * counts[-2][0]
    for prompt in itertools.chain(TASKS["look-alike"]("900", 48), TASKS["look-alike"]("3000", 6)):
        usual, other = (f"showed{piece.text}." for piece in prompt.reply if piece.scored)
        assert prompt.text.count(other) == 1
        assert prompt.text.count(usual) == prompt.text.count("Day ") - 1


def test_hops_are_apart_and_the_last_report_is_the_last() -> None:
    for prompt in TASKS["multi-hop"]("900", 48):
        person, town = (piece.text for piece in prompt.reply if piece.scored)
        assert prompt.text.index(f" is{person}.") < prompt.text.index(f"{person} lives in{town}.")
    for prompt in TASKS["aggregation"]("900", 48):
        places = [prompt.text.index(f"is now{piece.text}.") for piece in prompt.reply if piece.scored]
        assert places == sorted(places)


def test_cuts_lie_around_the_question_and_only_the_answer_counts() -> None:
    own = tokenizer()
    [prompt] = TASKS["multi-hop"]("900", 1)
    reading = read(own, prompt)
    text = own.decode(reading.ids)
    assert own.decode(reading.ids[: reading.cuts[UNSEEN]]).endswith(prompt.text + "\n\n")
    assert own.decode(reading.ids[reading.cuts[UNSEEN] : reading.cuts[SEEN]]).startswith(prompt.question)
    assert len(own.decode(reading.ids[: reading.cuts[SEEN]])) == text.index("The keeper", text.index("<assistant>")) - 1
    counted = "".join(own.decode([reading.ids[place]]) for place in reading.scored)
    assert counted == prompt.answer.replace(" ", ""), "a space alone is no answer"


def test_a_text_goes_on_behind_its_compressed_beginning() -> None:
    [prompt] = TASKS[PERPLEXITY]("900", 1)
    assert prompt.modes == (UNSEEN,)
    reading = read(tokenizer(), prompt)
    assert reading.cuts == {UNSEEN: 900}
    assert reading.scored == tuple(range(901, 901 + NEXT_TOKENS))
    with pytest.raises(ModelError, match="too few"):
        read(tokenizer(), Prompt(PERPLEXITY, "900", 0, "short"))


def test_a_tokenizer_that_joins_pieces_is_refused() -> None:
    joining = byte_tokenizer(TEMPLATE, merges=[("Ċ", "Ċ"), ("s", "Ġ"), ("sĠ", "x")])
    prompt = Prompt("any", "900", 0, "Text.", "What?", (Piece("It is", scored=False), Piece(" x", scored=True)))
    with pytest.raises(ModelError, match="joins two pieces"):
        read(joining, prompt)


def test_natural_texts_are_long_and_of_two_kinds() -> None:
    texts = list(itertools.islice(running_texts("900"), 48))
    assert sum("***" in text or "::=" in text or '"' in text for text in texts) > 12
    assert all(len(text) > 3_500 for text in texts)
    assert all(len(text) >= 15_000 for text in itertools.islice(running_texts("3000"), 6))


@pytest.mark.real
def test_real_contexts_are_as_long_as_they_are_called() -> None:
    _, real = load()
    for length, count, low, high in (("900", 48, 600, 1_250), ("3000", 6, 2_400, 3_600)):
        for task, prompts in TASKS.items():
            for prompt in prompts(length, count):
                reading = read(real, prompt)
                assert low <= reading.cuts[UNSEEN] <= high, (task, prompt.place, reading.cuts)
