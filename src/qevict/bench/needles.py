"""Facts hidden in ordinary prose: twelve texts, four facts for each, one of them hidden at a time."""

import json
import re
from importlib import resources

import attrs

from qevict.bench.prompts import Question

# Each step goes to the next text and back by about a quarter of the depth, so every twelve in a row use all
# texts, and any first few are spread over all depths.
_STRIDE = 37
_SENTENCE_END = re.compile(r"[.!?](?=\s)")


@attrs.frozen
class Needle:
    """A fact, the text that hides it, and the question that asks for it.

    Attributes:
        haystack: Name of the text.
        fact: The sentence that goes into the text at the question's depth.
        asked: The question, which only the fact answers.
    """

    haystack: str
    fact: str
    asked: Question


def load_needles() -> tuple[Needle, ...]:
    """Read the 48 needles that ship with the package, ordered so that the first few are a fair sample."""
    by_depth = sorted(map(_needle, json.loads(_read("needles.json"))), key=lambda needle: needle.asked.depth)
    return tuple(by_depth[_STRIDE * place % len(by_depth)] for place in range(len(by_depth)))


def load_haystack(name: str) -> str:
    """Read a text that ships with the package."""
    return _read(f"haystacks/{name}.txt").strip()


def document(needle: Needle) -> str:
    """Hide the fact in its text."""
    return hide(load_haystack(needle.haystack), needle.fact, needle.asked.depth)


def hide(text: str, fact: str, depth: float) -> str:
    """Put a fact into a text, behind the sentence whose end is nearest to a depth from 0 to 1."""
    place = depth * len(text)
    end = min((found.end() for found in _SENTENCE_END.finditer(text)), key=lambda end: abs(end - place))
    return f"{text[:end]} {fact}{text[end:]}"


def _needle(entry: dict[str, str | float]) -> Needle:
    asked = Question(**{field: entry[field] for field in ("question", "answer", "depth", "lead_in")})  # type: ignore[arg-type]
    return Needle(haystack=str(entry["haystack"]), fact=str(entry["fact"]), asked=asked)


def _read(name: str) -> str:
    return (resources.files("qevict.bench") / "data" / name).read_text(encoding="ascii")
