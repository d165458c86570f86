"""The needle's figures: a record for the repository, a table for a person, and what may be claimed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from rich import box
from rich.table import Table

from qevict.bench.needle import STORED, Contestant, Score
from qevict.bench.statistics import Difference, paired_difference

_STORED = str(STORED).removeprefix("torch.")


@attrs.frozen
class Figure:
    """One policy's row.

    Attributes:
        nats: mean over the prompts.
        sentence_nats: mean over the prompts, of the whole reply.
        exact_share: mean share of a full cache's bytes, right after the context.
        paper_share: the same in the paper's accounting.
        nats_by_prompt: in the order of the prompts.
        against: the policy that it is compared with.
        difference: own nats minus the other's; below zero, ours is better.
    """

    nats: float
    sentence_nats: float
    exact_share: float
    paper_share: float
    nats_by_prompt: tuple[float, ...]
    against: str | None = None
    difference: Difference | None = None


def figures(field: Mapping[str, Contestant], scores: Mapping[str, Sequence[Score]]) -> dict[str, Figure]:
    """A row per policy."""
    rows = {}
    for name, own in scores.items():
        nats = tuple(score.nats for score in own)
        against = field[name].against
        theirs = [score.nats for score in scores[against]] if against else None
        rows[name] = Figure(
            nats=_mean(nats),
            sentence_nats=_mean([score.sentence_nats for score in own]),
            exact_share=_mean([score.exact_share for score in own]),
            paper_share=_mean([score.paper_share for score in own]),
            nats_by_prompt=nats,
            against=against,
            difference=paired_difference(nats, theirs) if theirs else None,
        )
    return rows


def claims(rows: Mapping[str, Figure]) -> Iterator[str]:
    """What the figures show, a sentence each; nothing where an interval holds zero."""
    for name, row in rows.items():
        if row.difference is not None and row.difference.excludes_zero:
            size, order = abs(row.difference.mean), "fewer" if row.difference.mean < 0 else "more"
            yield f"{name}: {size:.2f} nats {order} than {row.against} ({_interval(row.difference)})"


def table(rows: Mapping[str, Figure]) -> Table:
    """The rows for a terminal."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column("policy")
    for heading in ("nats", "of the sentence", "exact", "paper"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("compared with")
    shown.add_column("difference (95 %)", justify="right", no_wrap=True)
    for name, row in rows.items():
        difference = "" if row.difference is None else f"{row.difference.mean:+.2f} ({_interval(row.difference)})"
        shares = (f"{100 * share:.1f} %" for share in (row.exact_share, row.paper_share))
        shown.add_row(name, f"{row.nats:.2f}", f"{row.sentence_nats:.2f}", *shares, row.against or "", difference)
    return shown


def as_record(rows: Mapping[str, Figure], **facts: Any) -> dict[str, Any]:
    """Plain data for a file: the facts first, then the rows, rounded to what they are good for."""
    return facts | {"stored": _STORED, "figures": {name: _rounded(attrs.asdict(row)) for name, row in rows.items()}}


def legend(prompts: int) -> str:
    """What the columns mean."""
    return (
        f"Means over {prompts} prompts. nats: per token of the answer, teacher-forced behind question and lead-in; of "
        "the sentence: lead-in included. exact: bytes of all storages right after the context; paper: codes x 1.05 and "
        f"no bookkeeping; both in percent of a full cache in {_STORED}. difference: own nats less the other policy's, "
        "with a paired bootstrap 95 % interval, uncorrected for the number of comparisons. Below: those whose interval "
        "excludes zero."
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def _interval(difference: Difference) -> str:
    return f"{difference.low:+.2f} to {difference.high:+.2f}"


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
