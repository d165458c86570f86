"""QEvict's score: attention mass, accumulated and never forgotten."""

from typing import ClassVar

import attrs
import torch

from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.errors import PolicyError
from qevict.shapes import Scores


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _positive_or_none(_instance: object, attribute: "attrs.Attribute[int | None]", value: int | None) -> None:
    if value is not None and not _is_count(value):
        msg = f"{attribute.name} is None (all) or at least 1, got {value!r}"
        raise PolicyError(msg)


def _positive(_instance: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if not _is_count(value):
        msg = f"{attribute.name} is a whole number of at least 1 (1: every query), got {value!r}"
        raise PolicyError(msg)


@attrs.frozen
class CumulativeAttention(Scorer):
    """Attention mass of a window, summed over all queries so far and averaged over the query heads of its lane.

    The sum starts from the prompt's own queries and never decays. QEvict (arXiv 2608.05326), eq. 1; with lanes of one
    KV head and windows of one token it is the accumulated score of H2O (arXiv 2306.14048).

    Args:
        prompt_queries: sum the prompt's masses over its last n queries only; None (default, the paper's reading) for
            all of them.
        prompt_stride: of these queries look at every n-th only, each for n; 1 (default) looks at all.
        observe_tokens: after the prompt, look at the last n tokens before each routing event only, each for
            ``period_tokens / n``; None (default) looks at all. The other steps compute no masses.

    Bytes: 4 per window and lane.
    """

    name: ClassVar[str] = "cumulative"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS})
    prompt_queries: int | None = attrs.field(default=None, validator=_positive_or_none)
    prompt_stride: int = attrs.field(default=1, validator=_positive)
    observe_tokens: int | None = attrs.field(default=None, validator=_positive_or_none)

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing seen, nothing scored."""
        return {"mass": torch.zeros(lanes, windows, dtype=torch.float32, device=device)}

    def update(self, state: State, observation: Observation) -> State:
        """Add the forward's masses, averaged over query heads; a query counts as often as it stands for others."""
        assert observation.mass is not None
        return {"mass": state["mass"].add(observation.mass.mean(dim=1), alpha=observation.stands_for)}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """The accumulated mass itself."""
        return {IMPORTANCE: state["mass"]}
