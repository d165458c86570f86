"""What the zoo leaves behind: every figure of every prompt, by task, cell and policy."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from qevict.bench.zoo.field import run_of
from qevict.bench.zoo.measure import Outcome
from qevict.errors import InputError

VERSION = 1


@attrs.frozen
class Row:
    """One policy in one cell of one task.

    Attributes:
        task: its name.
        length: of the prompts, by name.
        mode: unseen or seen.
        name: of the policy.
        budget: in text; None where there is none.
        places: which prompts, ascending.
        nats: per token that counts, by prompt.
        exact: whether every such token was the model's first choice, by prompt.
        shares: of a full cache's bytes, by prompt.
    """

    task: str
    length: str
    mode: str
    name: str
    budget: str | None
    places: tuple[int, ...]
    nats: tuple[float, ...]
    exact: tuple[bool, ...]
    shares: tuple[float, ...]

    @property
    def share(self) -> float:
        """Mean share of a full cache's bytes."""
        return sum(self.shares) / len(self.shares)


@attrs.frozen
class Record:
    """A run of the zoo.

    Attributes:
        facts: on what, with what and how long it was measured, and what was left out.
        rows: the figures.
    """

    facts: Mapping[str, Any]
    rows: tuple[Row, ...]

    def text(self) -> str:
        """As JSON, a row on a line."""
        facts = json.dumps({"version": VERSION, **self.facts}, indent=1).removesuffix("\n}")
        rows = ",\n  ".join(json.dumps(attrs.asdict(row)) for row in self.rows)
        return f'{facts},\n "rows": [\n  {rows}\n ]\n}}\n'

    def write(self, path: Path) -> None:
        """Keep it in a file."""
        path.write_text(self.text(), encoding="utf-8")


def load_record(path: Path) -> Record:
    """Read what :meth:`Record.write` has written.

    Raises:
        InputError: the file is not there, or not such a record.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        version, rows = plain.pop("version"), plain.pop("rows")
        found = Record(plain, tuple(_read_row(row) for row in rows))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no record of `qevict bench zoo --write`: {error!r}") from error
    if version != VERSION:
        raise InputError(f"{path} is a record of version {version}, this qevict reads {VERSION}; measure again")
    return found


def _read_row(plain: Mapping[str, Any]) -> Row:
    read: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    return Row(**read)


def rows_of(outcomes: Iterable[Outcome], order: Sequence[str]) -> tuple[Row, ...]:
    """Figures by task, cell and policy.

    Args:
        outcomes: of all visits.
        order: of the tasks.
    """
    gathered: dict[tuple[str, ...], dict[int, tuple[float, bool, float]]] = {}
    for outcome in outcomes:
        task, length, place = outcome.prompt.split("/")
        for key, score in outcome.scores.items():
            figures = round(score.nats, 4), score.exact, round(score.share, 4)
            gathered.setdefault((task, length, *run_of(key)), {})[int(place)] = figures
    by_task = sorted(
        gathered.items(), key=lambda each: (order.index(each[0][0]), each[0][1] != "900", each[0][2] != "unseen")
    )
    return tuple(_row(key, dict(sorted(found.items()))) for key, found in by_task)


def _row(key: tuple[str, ...], found: Mapping[int, tuple[float, bool, float]]) -> Row:
    task, length, mode, name, budget = key
    return Row(task, length, mode, name, budget or None, tuple(found), *zip(*found.values(), strict=True))
