"""Results as they come: a line per visit, so that a run that was stopped can be continued."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from qevict.bench.zoo.measure import Outcome, Score
from qevict.errors import InputError


@attrs.frozen
class Interim:
    """A file of JSON lines: first what the run is about, then a line per visit.

    Attributes:
        path: of the file.
    """

    path: Path

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Start anew; what the file held is gone."""
        self.path.write_text(json.dumps(facts) + "\n", encoding="utf-8")

    def add(self, outcome: Outcome) -> None:
        """Append what came of a visit."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(attrs.asdict(outcome)) + "\n")

    def read(self, facts: Mapping[str, Any]) -> list[Outcome]:
        """What an earlier run has measured; a last line that was cut off by the end of its run is dropped.

        Args:
            facts: what this run is about.

        Raises:
            InputError: there is no such file, or it is about something else.
        """
        if not self.path.is_file():
            raise InputError(f"nothing to continue: {self.path} is not there; leave --continue out")
        first, *lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        theirs = json.loads(first)
        if other := sorted(name for name in {*theirs, *facts} if theirs.get(name) != facts.get(name)):
            told = "; ".join(f"{name}: {theirs.get(name)!r} then, {facts.get(name)!r} now" for name in other)
            raise InputError(f"{self.path} is of another run ({told}); continue it as it was begun, or start anew")
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines):
            self.path.write_text("".join((first, *whole)), encoding="utf-8")
        return [_outcome(json.loads(line)) for line in whole]


def _outcome(plain: Mapping[str, Any]) -> Outcome:
    scores = {key: Score(**score) for key, score in plain["scores"].items()}
    return Outcome(**{**plain, "scores": scores})


def done(outcomes: Sequence[Outcome]) -> dict[str, set[str]]:
    """Keys of what has been measured or refused, by prompt."""
    found: dict[str, set[str]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.prompt, set()).update(outcome.scores, outcome.refused)
    return found


def scores_of(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str, Score]]:
    """Prompt, run and score of everything measured."""
    for outcome in outcomes:
        for key, score in outcome.scores.items():
            yield outcome.prompt, key, score
