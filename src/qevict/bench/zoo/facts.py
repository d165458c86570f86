"""Tasks whose answer is a fact that is hidden in prose."""

import random
from collections.abc import Iterator

from qevict.bench.needles import document, load_needles
from qevict.bench.zoo.prompts import Piece, Prompt
from qevict.bench.zoo.texts import LONG, hide_all, prose, words


def needles(length: str) -> Iterator[Prompt]:
    """The 48 facts of ``qevict bench needle``; in a long text, two other texts stand around theirs."""
    for place, needle in enumerate(load_needles()):
        text, asked = document(needle), needle.asked
        if length == LONG:
            first, second = (prose("900", place + step) for step in (4, 8))
            parts = [first, second]
            parts.insert(place % 3, text)
            text = "\n\n".join(parts)
        reply = _reply(asked.lead_in, asked.answer)
        yield Prompt("needle", length, place, text, asked.question, reply)


def keyed_needles(length: str, count: int) -> Iterator[Prompt]:
    """Four facts of one kind, one of which is asked for."""
    for place, chance in _draws("multi-key needle", length, count):
        rooms, codes = chance.sample(words("rooms"), 4), chance.sample(range(1000, 10_000), 4)
        facts = [f"The door code for the {room} is {code}." for room, code in zip(rooms, codes, strict=True)]
        asked, code = rooms[place % 4], codes[place % 4]
        yield Prompt(
            "multi-key needle",
            length,
            place,
            hide_all(prose(length, place), facts),
            f"What is the door code for the {asked}?",
            _reply(f"The door code for the {asked} is", str(code)),
        )


def recall(length: str, count: int) -> Iterator[Prompt]:
    """Eight pairs of a name and a room in prose; one name is asked for."""
    for place, chance in _draws("key-value recall", length, count):
        people, rooms = chance.sample(words("people"), 8), chance.sample(range(100, 1000), 8)
        facts = [f"{name} stays in room {room}." for name, room in zip(people, rooms, strict=True)]
        asked, room = people[place % 8], rooms[place % 8]
        yield Prompt(
            "key-value recall",
            length,
            place,
            hide_all(prose(length, place), facts),
            f"In which room does {asked} stay?",
            _reply(f"{asked} stays in room", str(room)),
        )


def two_hops(length: str, count: int) -> Iterator[Prompt]:
    """Who keeps a thing, and where that person lives: the first fact names what the second is about.

    Another thing, its keeper and that one's town stand between, so that no answer is the only one of its kind.
    """
    for place, chance in _draws("multi-hop", length, count):
        things, people, towns = (
            chance.sample(words("treasures"), 2),
            chance.sample(words("people"), 2),
            chance.sample(words("towns"), 2),
        )
        keepers = [f"The keeper of the {thing} is {name}." for thing, name in zip(things, people, strict=True)]
        homes = [f"{name} lives in {town}." for name, town in zip(people, towns, strict=True)]
        asked = place % 2
        yield Prompt(
            "multi-hop",
            length,
            place,
            hide_all(prose(length, place), [*keepers, *chance.sample(homes, 2)]),
            f"Who is the keeper of the {things[asked]}, and where does that person live?",
            (
                Piece(f"The keeper of the {things[asked]} is", scored=False),
                Piece(f" {people[asked]}", scored=True),
                Piece(f". {people[asked]} lives in", scored=False),
                Piece(f" {towns[asked]}", scored=True),
            ),
        )


def updates(length: str, count: int) -> Iterator[Prompt]:
    """A number that is reported four times; the reply gathers all of them in their order."""
    for place, chance in _draws("aggregation", length, count):
        stock, counts = chance.choice(words("stocks")), chance.sample(range(11, 99), 4)
        facts = [f"The number of {stock} in the store is now {number}." for number in counts]
        first, *others = counts
        reply = list(_reply(f"The number of {stock} in the store was first", str(first)))
        for number in others:
            reply += _reply(", then", str(number))
        yield Prompt(
            "aggregation",
            length,
            place,
            hide_all(prose(length, place), facts),
            f"Which numbers of {stock} in the store were reported, one after another?",
            tuple(reply),
        )


def _draws(task: str, length: str, count: int) -> Iterator[tuple[int, random.Random]]:
    """Numbers of prompts, each with a chance of its own, so that more prompts leave the first as they are."""
    for place in range(count):
        yield place, random.Random(f"{task}/{length}/{place}")


def _reply(lead_in: str, answer: str) -> tuple[Piece, ...]:
    return Piece(lead_in, scored=False), Piece(f" {answer}", scored=True)
