"""The demo's document, its questions, and how both become token ids.

A prompt is one user message, ``document + blank line + question``, cut behind the blank line: before the cut
is the *context*, which a policy compresses before any question is seen; behind it is the *question*.
"""

import json
from importlib import resources

import attrs
from transformers import PreTrainedTokenizerBase, TextStreamer

from qevict.errors import InputError, ModelError

_DOCUMENT = "atlas.txt"
_QUESTIONS = "questions.json"
_GAP = "\n\n"
_REPLY_MARK = "[[reply]]"


@attrs.frozen
class Document:
    """A text with facts hidden in it."""

    name: str
    text: str


@attrs.frozen
class Question:
    """A question about the document.

    Attributes:
        question: What is asked.
        answer: The string a right reply contains.
        depth: Where the fact stands in the document, from 0 (start) to 1 (end).
        lead_in: The words of a right reply that come before the answer.
    """

    question: str
    answer: str
    depth: float = attrs.field(validator=[attrs.validators.ge(0.0), attrs.validators.le(1.0)])
    lead_in: str = ""

    def is_answered_by(self, reply: str) -> bool:
        """Tell whether a reply contains the answer; case does not matter."""
        return self.answer.casefold() in reply.casefold()


def load_document() -> Document:
    """Read the document that ships with the package."""
    return Document(name=_DOCUMENT.removesuffix(".txt"), text=_read(_DOCUMENT).strip())


def load_questions() -> tuple[Question, ...]:
    """Read the questions that ship with the package; the first two are the demo's pair."""
    return tuple(Question(**entry) for entry in json.loads(_read(_QUESTIONS)))


def split_prompt(tokenizer: PreTrainedTokenizerBase, document: str, question: str) -> tuple[list[int], list[int]]:
    """Tokenize document and question as one chat message and cut between them.

    Both parts together are exactly the ids of the whole prompt, and the first
    part is the same for every question.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        document: The text to answer from; outer white space is dropped.
        question: What is asked; outer white space is dropped.

    Returns:
        The context (everything through the blank line behind the document) and
        the question (with the header that opens the assistant's turn).

    Raises:
        ModelError: If the tokenizer cannot do this.
    """
    document, question = _stripped("document", document), _stripped("question", question)
    text = _render(tokenizer, [_user(document + _GAP + question)])
    start = text.find(document + _GAP)
    if start < 0:
        raise ModelError("the tokenizer's chat template alters the message it is given.")
    cut = start + len(document + _GAP)
    ids, ends = _encode_with_ends(tokenizer, text)
    context_tokens = sum(end <= cut for end in ends)
    if context_tokens and ends[context_tokens - 1] != cut:
        raise ModelError("the tokenizer joins the blank line behind the document to the question.")
    return ids[:context_tokens], ids[context_tokens:]


def chat_ids(tokenizer: PreTrainedTokenizerBase, message: str) -> list[int]:
    """Tokenize one user message and the header that opens the assistant's turn."""
    return _encode(tokenizer, _render(tokenizer, [_user(_stripped("message", message))]))


def generation_ids(
    tokenizer: PreTrainedTokenizerBase, document: str | None, message: str, *, raw: bool
) -> tuple[list[int], list[int]]:
    """Tokenize what is read before the message, if anything, and the message.

    Args:
        tokenizer: Any tokenizer; with a chat template both become one user message.
        document: What is read first; None for nothing.
        message: What is said.
        raw: Take the texts as they are, without the template.
    """
    if raw or not tokenizer.chat_template:
        first = [] if document is None else list(tokenizer(document)["input_ids"])
        return first, list(tokenizer(message, add_special_tokens=document is None)["input_ids"])
    return ([], chat_ids(tokenizer, message)) if document is None else split_prompt(tokenizer, document, message)


def stream(tokenizer: PreTrainedTokenizerBase) -> TextStreamer:
    """Make ``generate`` print its text as it comes."""
    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def next_turn(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Tokenize what follows a reply: its end, a further question, the next reply's header.

    The end-of-turn token is included, so a caller drops the one that the model
    itself may have generated last.
    """
    turns = [_user("-"), {"role": "assistant", "content": _REPLY_MARK}]
    turns.append(_user(_stripped("question", question)))
    _, mark, rest = _render(tokenizer, turns).partition(_REPLY_MARK)
    if not mark:
        raise ModelError("the tokenizer's chat template drops earlier replies.")
    return _encode(tokenizer, rest)


def answer_ids(tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
    """Tokenize an answer as the words with which a reply begins."""
    return _encode(tokenizer, _stripped("answer", answer))


def reply_ids(tokenizer: PreTrainedTokenizerBase, question: Question) -> tuple[list[int], list[int]]:
    """Tokenize a right reply, cut where the answer begins.

    A model mostly repeats the question before it answers; measured behind that
    lead-in, the answer's likelihood tells whether the fact is still known.

    Returns:
        The lead-in (empty if the question has none) and the answer behind it.
    """
    if not question.lead_in:
        return [], answer_ids(tokenizer, question.answer)
    lead = _encode(tokenizer, question.lead_in)
    whole = _encode(tokenizer, f"{question.lead_in} {question.answer}")
    if whole[: len(lead)] != lead:
        raise ModelError(f"the tokenizer joins {question.lead_in!r} to the answer behind it.")
    return lead, whole[len(lead) :]


def _read(name: str) -> str:
    return (resources.files("qevict.bench") / "data" / name).read_text(encoding="utf-8")


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _stripped(what: str, text: str) -> str:
    if not (stripped := text.strip()):
        raise InputError(f"the {what} is {text!r}: give at least one visible character.")
    return stripped


def _render(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]]) -> str:
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: give an "
            "instruction-tuned model, or set tokenizer.chat_template."
        )
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except Exception as error:
        raise ModelError(f"the chat template of {tokenizer.name_or_path!r} fails: {error}") from error


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _encode_with_ends(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    if not tokenizer.is_fast:
        raise ModelError(
            f"{type(tokenizer).__name__} does not report where tokens stand in the text: "
            "give a model with a fast tokenizer (tokenizer.json)."
        )
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(coded["input_ids"]), [end for _, end in coded["offset_mapping"]]
