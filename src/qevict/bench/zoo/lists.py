"""Tasks whose text is made of parts that look alike."""

import random
from collections.abc import Iterator

from qevict.bench.zoo.prompts import Piece, Prompt
from qevict.bench.zoo.texts import SHORT, words

_DISTINCT, _RARE, _OFTEN = 10, 21, 200
_ENTRIES = {"900": 14, "3000": 46}


def common_words(length: str, count: int) -> Iterator[Prompt]:
    """A list of ten words, one of which stands more often than all others together.

    After RULER's common words (arXiv 2404.06654), made easier for a small model.
    """
    rounds = 1 if length == SHORT else 4
    for place in range(count):
        chance = random.Random(f"common words/{length}/{place}")
        common, *others = chance.sample(words("nouns"), _DISTINCT)
        listed = [common] * (_OFTEN * rounds) + others * (_RARE * rounds)
        chance.shuffle(listed)
        yield Prompt(
            "common words",
            length,
            place,
            "Here is a list of words: " + ", ".join(listed) + ".",
            "List the words of the list, from the rarest to the most common.",
            (Piece(", ".join(others[:3]) + ",", scored=False), Piece(f" {common}", scored=True)),
        )


def logbooks(length: str, count: int) -> Iterator[Prompt]:
    """Daily entries that are equal but for their number and, on one day, for a reading; the reply sums them up."""
    for place in range(count):
        chance = random.Random(f"look-alike/{length}/{place}")
        gauge, machine = chance.choice(words("gauges")), chance.choice(words("machines"))
        usual, other = chance.sample(range(11, 99), 2)
        days = _ENTRIES[length]
        odd = chance.randrange(2, days - 3)
        entries = [_entry(day, machine, gauge, other if day == odd else usual) for day in range(1, days + 1)]
        yield Prompt(
            "look-alike",
            length,
            place,
            "\n\n".join(entries),
            f"What did the {gauge} show on most days, and what did it show on the one day that was different?",
            (
                Piece(f"On most days the {gauge} showed", scored=False),
                Piece(f" {usual}", scored=True),
                Piece(", but on one day it showed", scored=False),
                Piece(f" {other}", scored=True),
            ),
        )


def _entry(day: int, machine: str, gauge: str, reading: int) -> str:
    return (
        f"Day {day}. The {machine} was started at six in the morning and ran until the evening bell. "
        f"The filters were cleaned, the belts were looked over, and the {gauge} showed {reading}. Nothing else is "
        f"to be noted, and the keys were handed to the night watch as usual."
    )
