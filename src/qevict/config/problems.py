"""How the problems of a file are found, gathered and worded, so that all of them are told at once."""

import contextlib
import difflib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

from qevict.errors import PolicyFileError, Problem, QevictError

_LONGEST = 60
"""Characters of a value that a message shows."""


def refuse(at: str, message: str) -> NoReturn:
    """Say that something is wrong there.

    Raises:
        PolicyFileError: always.
    """
    raise PolicyFileError([Problem(at, message)])


@contextlib.contextmanager
def blame(at: str) -> Iterator[None]:
    """Make whatever is raised inside a problem of that place."""
    try:
        yield
    except PolicyFileError:
        raise
    except Exception as error:  # noqa: BLE001 - validators of plugins may raise anything
        refuse(at, _told(error))


@contextlib.contextmanager
def gathering() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Give out a context for each of several attempts; at the end raise the problems of all of them together.

    Raises:
        PolicyFileError: an attempt failed.
    """
    problems: list[Problem] = []
    yield functools.partial(_attempt, problems)
    if problems:
        raise PolicyFileError(problems)


@contextlib.contextmanager
def _attempt(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except PolicyFileError as error:
        problems.extend(error.problems)


def step(at: str, key: str) -> str:
    """The path of a key in the table at that path."""
    return f"{at}.{key}" if re.fullmatch(r"[A-Za-z0-9_-]+", key) else f"{at}.{json.dumps(key, ensure_ascii=False)}"


def shown(value: object) -> str:
    """A value as a file would write it, in few words."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            text = json.dumps(value, ensure_ascii=False)
        case Mapping():
            return "a table"
        case list():
            return "an array"
        case _:
            text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def suggestion(word: object, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    near = difflib.get_close_matches(word, list(known), n=1) if isinstance(word, str) else []
    return near[0] if near else None


def did_you_mean(word: object, known: Sequence[str]) -> str:
    """The end of a message about an unknown word: what was probably meant; else, what there is."""
    if meant := suggestion(word, known):
        return f"; did you mean {meant!r}?"
    return f"; known: {', '.join(known)}" if known else "; there are none to give"


def _told(error: Exception) -> str:
    """The error's own message, in one line; attrs puts more than the message into its errors."""
    first = error.args[0] if error.args else None
    text = first if isinstance(first, str) and not isinstance(error, QevictError) else str(error)
    text = re.sub(r"(?<=[?:;,])\s*\n\s*", " ", text.strip())
    text = re.sub(r"\s*\n\s*", "; ", text)
    return text if isinstance(error, QevictError | ValueError | TypeError) else f"{type(error).__name__}: {text}"
