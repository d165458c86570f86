"""What the zoo's prompts are made of: the shipped texts, facts hidden in them, and the language's own manual."""

import functools
import json
import pydoc_data.topics
from collections.abc import Iterable, Iterator
from importlib import resources

from qevict.bench.needles import hide, load_haystack

SHORT, LONG = "900", "3000"
_TEXTS_OF_LONG = 3
_STRIDE = 5  # goes through all twelve texts, and neighbours in a long text never repeat
_BLOCK_CHARACTERS = {SHORT: 5_600, LONG: 15_500}


@functools.cache
def names() -> tuple[str, ...]:
    """The shipped texts, in order."""
    folder = resources.files("qevict.bench") / "data" / "haystacks"
    return tuple(sorted(text.name.removesuffix(".txt") for text in folder.iterdir()))


@functools.cache
def words(kind: str) -> list[str]:
    """Words of which facts are made."""
    found: dict[str, list[str]] = json.loads(
        (resources.files("qevict.bench") / "data" / "words.json").read_text("ascii")
    )
    return found[kind]


def prose(length: str, place: int) -> str:
    """A shipped text, or three of them one behind another."""
    count = 1 if length == SHORT else _TEXTS_OF_LONG
    return "\n\n".join(load_haystack(names()[(place + _STRIDE * part) % len(names())]) for part in range(count))


def hide_all(text: str, facts: Iterable[str]) -> str:
    """Hide facts at depths that are spread evenly, in their order."""
    facts = tuple(facts)
    for number, fact in enumerate(facts):
        text = hide(text, fact, (number + 0.5) / len(facts))
    return text


def running_texts(length: str) -> Iterator[str]:
    """Long natural texts: the shipped ones and Python's manual by turns while both last, then the manual alone."""
    shipped = [load_haystack(name) for name in names()] if length == SHORT else []
    manual = list(_manual(_BLOCK_CHARACTERS[length]))
    for number, block in enumerate(manual):
        if number % 3 == 0 and number // 3 < len(shipped):
            yield shipped[number // 3]
        yield block


def _manual(characters: int) -> Iterator[str]:
    """Blocks of whole paragraphs from the topics of ``pydoc``; they differ between versions of Python."""
    for _, topic in sorted(pydoc_data.topics.topics.items()):
        block = ""
        for paragraph in topic.strip().split("\n\n"):
            block = f"{block}\n\n{paragraph}" if block else paragraph
            if len(block) >= characters:
                yield block
                block = ""
