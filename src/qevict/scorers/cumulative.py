"""QEvict's score: attention mass, accumulated and never forgotten."""

from typing import ClassVar

import attrs
import torch

from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.scorers.fields import at_least_one, at_least_one_or_none
from qevict.shapes import Scores


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
    prompt_queries: int | None = attrs.field(default=None, validator=at_least_one_or_none)
    prompt_stride: int = attrs.field(default=1, validator=at_least_one)
    observe_tokens: int | None = attrs.field(default=None, validator=at_least_one_or_none)

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
