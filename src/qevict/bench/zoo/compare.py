"""Policies of one scene against each other: losses, paired differences, and who is on the front."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from qevict.bench.statistics import Difference, paired_difference
from qevict.bench.zoo.curve import interpolate
from qevict.bench.zoo.field import FULL, OURS
from qevict.bench.zoo.record import Row
from qevict.bench.zoo.tasks import PERPLEXITY, RETRIEVAL

KNOWN_FROM = 0.5
"""Task scores are shown where the full cache gets at least this part of the answers right."""

SLACK = 0.002
"""Two policies within so much of a full cache's bytes hold the same."""

LEAST = 4
"""Fewer prompts than that have no interval: resamples of two or three say nothing."""

Place = tuple[str, int]
"""A prompt: its task and number."""

Contender = tuple[str, str | None]
"""A policy at a budget."""


@attrs.frozen
class Seen:
    """What one policy made of one prompt: loss against the full cache, answer right, share of bytes."""

    loss: float
    exact: bool
    share: float


@attrs.frozen
class Scene:
    """Prompts of one kind, in one length and mode.

    Attributes:
        title: what the task is called; "retrieval" for several together.
        length: by name.
        mode: unseen or seen.
        seen: by contender and prompt.
    """

    title: str
    length: str
    mode: str
    seen: Mapping[Contender, Mapping[Place, Seen]]

    def share(self, contender: Contender) -> float:
        """Mean share of bytes."""
        own = self.seen[contender].values()
        return sum(each.share for each in own) / len(own)

    def loss(self, contender: Contender) -> Difference | None:
        """Loss against the full cache; None of a few prompts."""
        own = [each.loss for each in self.seen[contender].values()]
        return _paired(own, [0.0] * len(own))

    def score(self, contender: Contender) -> float | None:
        """Part of the answers that are right, where the full cache knows them."""
        full = self.seen.get((FULL, None))
        if full is None or self.title == PERPLEXITY or _right(full.values()) < KNOWN_FROM:
            return None
        return _right(self.seen[contender].values())

    def difference(self, ours: Contender, theirs: Contender) -> Difference | None:
        """Own loss less the other's, on the prompts of both; None of a few."""
        one, other = self.seen.get(ours, {}), self.seen.get(theirs, {})
        common = [place for place in one if place in other]
        return _paired([one[place].loss for place in common], [other[place].loss for place in common])

    def at_equal_bytes(self, contender: Contender) -> Difference | None:
        """Own loss less that of QEvict at the same budget, or interpolated at the same bytes where there is none."""
        if contender[1] is not None:
            return self.difference(contender, (OURS, contender[1]))
        pairs = [(own.loss, self._interpolated(place, own.share)) for place, own in self.seen[contender].items()]
        known = [(own, theirs) for own, theirs in pairs if theirs is not None]
        return _paired([own for own, _ in known], [theirs for _, theirs in known])

    def _interpolated(self, place: Place, share: float) -> float | None:
        """QEvict's loss on a prompt; None unless all its budgets were measured there."""
        curve = [own for contender, own in self.seen.items() if contender[0] == OURS or contender == (FULL, None)]
        if len(curve) < 2 or not all(place in own for own in curve):
            return None
        return interpolate(sorted((own[place].share, own[place].loss) for own in curve), share)

    def front(self, contender: Contender) -> bool | None:
        """True: nobody with as many bytes or fewer has a lower mean. False: somebody is better beyond doubt.

        None: somebody has a lower mean, but the interval holds zero; or there are few prompts.
        """
        own, best = self.share(contender), len(self.seen[contender]) >= LEAST
        for other in self.seen:
            if other != contender and self.share(other) <= own + SLACK:
                found = self.difference(other, contender)
                if found is not None and found.mean < 0:
                    if found.excludes_zero:
                        return False
                    best = False
        return True if best else None


def scenes(rows: Sequence[Row]) -> Iterator[Scene]:
    """Retrieval as a whole, then each task, in every length and mode."""
    for length, mode in dict.fromkeys((row.length, row.mode) for row in rows):
        own = [row for row in rows if (row.length, row.mode) == (length, mode)]
        tasks = tuple(dict.fromkeys(row.task for row in own))
        together = tuple(task for task in tasks if task in RETRIEVAL)
        named = {"retrieval": together} if len(together) > 1 else {}
        for title, members in (named | {task: (task,) for task in tasks}).items():
            yield Scene(title, length, mode, _seen([row for row in own if row.task in members]))


def _seen(rows: Iterable[Row]) -> dict[Contender, dict[Place, Seen]]:
    """Everything on prompts of which the full cache's nats are known."""
    rows = tuple(rows)
    full = {
        (row.task, place): nats
        for row in rows
        if row.name == FULL
        for place, nats in zip(row.places, row.nats, strict=True)
    }
    found: dict[Contender, dict[Place, Seen]] = {}
    for row in rows:
        own = found.setdefault((row.name, row.budget), {})
        for number, *figures in zip(row.places, row.nats, row.exact, row.shares, strict=True):
            place, (nats, exact, share) = (row.task, number), figures
            if place in full:
                own[place] = Seen(nats - full[place], bool(exact), share)
    return {contender: own for contender, own in found.items() if own}


def _paired(ours: Sequence[float], theirs: Sequence[float]) -> Difference | None:
    return paired_difference(ours, theirs) if len(ours) >= LEAST else None


def _right(seen: Iterable[Seen]) -> float:
    own = [each.exact for each in seen]
    return sum(own) / len(own)
