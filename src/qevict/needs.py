"""What a scorer's declarations ask of the other parts of a policy."""

from collections.abc import Iterable

from qevict.contracts.backend import AttentionBackend
from qevict.contracts.scorer import Repeats, Scorer
from qevict.contracts.values import ATTENDED, Need
from qevict.errors import PolicyError

_BY_THEMSELVES = frozenset(
    {Need.MASS, Need.MASS_BY_QUERY, Need.QUERIES, Need.KEYS, Need.VALUES, Need.PROMPT, Need.HELD}
)
"""Needs of which each is a reason to show a scorer something."""

_AT_THE_PROMPTS_END = frozenset({Need.MASS_BY_QUERY, Need.QUERIES, Need.PROMPT, Need.HELD})


def check_looks(scorer: Scorer, period_tokens: int) -> None:
    """Refuse a scorer that looks at queries which there cannot be.

    Raises:
        PolicyError: with what is allowed.
    """
    stride, observed = scorer.prompt_stride, scorer.observe_tokens
    if scorer.prompt_queries is not None and (not _is_whole(scorer.prompt_queries) or scorer.prompt_queries < 1):
        msg = f"scorer {scorer.name!r} has prompt_queries={scorer.prompt_queries!r}; give at least 1, or None for all"
        raise PolicyError(msg)
    if not _is_whole(stride) or stride < 1:
        msg = f"scorer {scorer.name!r} has prompt_stride={stride!r}; give a whole number of at least 1"
        raise PolicyError(msg)
    if observed is not None and (not _is_whole(observed) or not 1 <= observed <= period_tokens):
        msg = (
            f"scorer {scorer.name!r} has observe_tokens={observed!r}, but looks at tokens of one routing period, "
            f"period_tokens={period_tokens}; give a whole number from 1 to {period_tokens}, or None for all"
        )
        raise PolicyError(msg)


def check_needs(scorer: Scorer) -> None:
    """Some needs are of no use alone, and a repetition comes in the place of the prompt's end.

    Raises:
        PolicyError: with what to give up or to add.
    """
    needs = scorer.needs
    if strange := [each for each in needs if not isinstance(each, Need)]:
        msg = f"scorer {scorer.name!r} needs {strange[0]!r}; needs are members of qevict.contracts.values.Need"
        raise PolicyError(msg)
    if Need.RECONSTRUCTION in needs and not isinstance(scorer.repeats, Repeats):
        msg = f"scorer {scorer.name!r} needs a reconstruction; its repeats must be Repeats(...), got {scorer.repeats!r}"
        raise PolicyError(msg)
    if needs and not needs & {*_BY_THEMSELVES, Need.RECONSTRUCTION}:
        msg = (
            f"scorer {scorer.name!r} needs {_named(needs)}, which is shown beside something else only; add one of "
            f"{_named(_BY_THEMSELVES)}, or need nothing"
        )
        raise PolicyError(msg)
    if Need.RECONSTRUCTION in needs and needs & _AT_THE_PROMPTS_END:
        msg = (
            f"scorer {scorer.name!r} needs a reconstruction, which is shown in the place of the prompt's end, and "
            f"{_named(needs & _AT_THE_PROMPTS_END)}, which is shown there; give up one of them"
        )
        raise PolicyError(msg)


def _named(needs: Iterable[Need]) -> str:
    return ", ".join(sorted(need.value for need in needs))


def check_backend(scorer: Scorer, backend: AttentionBackend | None) -> None:
    """Refuse a backend that does not tell what the scorer needs of it.

    Raises:
        PolicyError: naming both.
    """
    missing = set() if backend is None else scorer.needs & ATTENDED - backend.provides
    if missing and backend is not None:
        msg = (
            f"scorer {scorer.name!r} needs {_named(missing)}, which backend {backend.name!r} does not provide; use "
            f"another scorer or backend"
        )
        raise PolicyError(msg)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
