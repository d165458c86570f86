"""A prompt of the zoo, and how it becomes tokens: one reading, cut where a policy compresses."""

from typing import Any

import attrs

from qevict.bench.prompts import generation_ids
from qevict.errors import ModelError

UNSEEN, SEEN = "unseen", "seen"
"""Whether the question stands in what is compressed."""

NEXT_TOKENS = 200
"""Tokens of a text that are scored behind its compressed beginning."""

CONTEXT_TOKENS = {"900": 900, "3000": 3000}
"""How much of a text is compressed, by the name of the length."""


@attrs.frozen
class Piece:
    """A part of a reply.

    Attributes:
        text: with the space in front of it.
        scored: whether its tokens are what was asked for.
    """

    text: str
    scored: bool


@attrs.frozen
class Prompt:
    """A text, and what is expected behind it.

    Attributes:
        task: name of the task.
        length: name of the length, "900" or "3000".
        place: number among the prompts of its task and length.
        text: what is compressed.
        question: what is asked; empty where the text itself goes on.
        reply: a right reply, in pieces; of a text that goes on, nothing.
    """

    task: str
    length: str
    place: int
    text: str
    question: str = ""
    reply: tuple[Piece, ...] = ()

    @property
    def key(self) -> str:
        """What interim files know it by."""
        return f"{self.task}/{self.length}/{self.place}"

    @property
    def modes(self) -> tuple[str, ...]:
        """A text that goes on has no question to be seen."""
        return (UNSEEN, SEEN) if self.question else (UNSEEN,)

    @property
    def answer(self) -> str:
        """The scored pieces alone."""
        return "".join(piece.text for piece in self.reply if piece.scored)


@attrs.frozen
class Reading:
    """A prompt as tokens.

    Attributes:
        ids: context, question and reply, or a text and how it goes on.
        cuts: how many tokens are compressed, by :data:`UNSEEN` and :data:`SEEN`.
        scored: places of the tokens that count, ascending.
    """

    ids: tuple[int, ...]
    cuts: dict[str, int]
    scored: tuple[int, ...]


def read(tokenizer: Any, prompt: Prompt) -> Reading:
    """Tokenize a prompt.

    The last token before the reply is never compressed, since the reply's first token is told from it.

    Raises:
        ModelError: the tokenizer has no chat template, does not report places, or joins two pieces into one token; or
            the text is too short to be cut.
    """
    if not prompt.question:
        return _read_text(tokenizer, prompt)
    context, question = generation_ids(tokenizer, prompt.text, prompt.question, raw=False)
    before = len(context) + len(question)
    reply, scored = _reply(tokenizer, prompt.reply)
    cuts = {UNSEEN: len(context), SEEN: before - 1}
    return Reading((*context, *question, *reply), cuts, tuple(before + place for place in scored))


def _read_text(tokenizer: Any, prompt: Prompt) -> Reading:
    ids = tokenizer(prompt.text)["input_ids"]
    cut = min(CONTEXT_TOKENS[prompt.length], len(ids) - NEXT_TOKENS - 1)
    if cut < 1:
        raise ModelError(
            f"{prompt.key} has {len(ids)} tokens, too few to score the last {NEXT_TOKENS}; take longer texts"
        )
    until = cut + 1 + NEXT_TOKENS
    return Reading(tuple(ids[:until]), {UNSEEN: cut}, tuple(range(cut + 1, until)))


def _reply(tokenizer: Any, pieces: tuple[Piece, ...]) -> tuple[list[int], list[int]]:
    """Tokens of the reply, and the places of those that overlap a scored piece; a space alone is no answer."""
    text = "".join(piece.text for piece in pieces)
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans, end = [], 0
    for piece in pieces:
        start, end = end, end + len(piece.text)
        if piece.scored:
            spans.append((start, end))
    scored = []
    for place, (start, until) in enumerate(coded["offset_mapping"]):
        inside = [low <= start and until <= high for low, high in spans if start < high and low < until]
        if not all(inside):
            raise ModelError(f"the tokenizer joins two pieces of the reply {text!r} at {text[start:until]!r}")
        if inside and text[start:until].strip():
            scored.append(place)
    return list(coded["input_ids"]), scored
