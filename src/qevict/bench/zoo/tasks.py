"""All tasks of the zoo."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from qevict.bench.zoo import facts, lists
from qevict.bench.zoo.prompts import Prompt
from qevict.bench.zoo.texts import running_texts

PERPLEXITY: Final = "perplexity"


def _continuations(length: str, count: int) -> Iterator[Prompt]:
    """Natural text that goes on behind its compressed beginning."""
    for place, text in enumerate(itertools.islice(running_texts(length), count)):
        yield Prompt(PERPLEXITY, length, place, text)


def _needles(length: str, count: int) -> Iterator[Prompt]:
    return itertools.islice(facts.needles(length), count)


TASKS: Final[Mapping[str, Callable[[str, int], Iterator[Prompt]]]] = MappingProxyType(
    {
        "needle": _needles,
        PERPLEXITY: _continuations,
        "multi-key needle": facts.keyed_needles,
        "key-value recall": facts.recall,
        "common words": lists.common_words,
        "multi-hop": facts.two_hops,
        "aggregation": facts.updates,
        "look-alike": lists.logbooks,
    }
)
"""Prompts by task, given a length and how many; those that the target speaks of come first."""

RETRIEVAL: Final = ("needle", "multi-key needle", "key-value recall")
"""The tasks that ask for a fact, which "retrieval" means together."""
