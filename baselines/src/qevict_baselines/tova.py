"""TOVA: Transformers are Multi-State RNNs (arXiv 2401.06104)."""

from typing import ClassVar

import attrs
import torch

from qevict.contracts.budget import Budget
from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.policy import Policy
from qevict.routers.greedy import GreedyTiers
from qevict.shapes import Scores
from qevict_baselines.accumulators import no_mass, with_masses
from qevict_baselines.composing import evicting


@attrs.frozen
class LastQuery(Scorer):
    """Attention of the latest query alone; what it does not look at is forgotten.

    TOVA (arXiv 2401.06104). Faithful: windows of one token, a period of one token, rows as lanes (the mean
    over all query heads of the layer, one set for all KV heads), no sinks and nothing recent protected: the newest
    token competes as any other. As in the authors' code the prompt is one step, scored by its last query. Different:
    with a longer period the query is the last before each event.

    Bytes: 4 per window and lane.
    """

    name: ClassVar[str] = "last_query"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS, Need.FIRST_LOOKS})
    prompt_queries = 1
    observe_tokens = 1

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing seen."""
        return {"mass": no_mass(lanes, windows, device)}

    def update(self, state: State, observation: Observation) -> State:
        """Replace what an earlier query looked at."""
        return {"mass": with_masses(state["mass"], observation, kept=0.0)}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """The masses of the latest query."""
        return {IMPORTANCE: state["mass"]}


def tova(budget: Budget | str, *, dtype: torch.dtype | None = None) -> Policy:
    """Tokens that the latest query attends to most, one set for all heads of a layer; the newest competes as any other.

    TOVA (Oren et al., Transformers are Multi-State RNNs, arXiv 2401.06104): see :class:`LastQuery`. One
    token leaves for each that comes, at original positions; the prompt is cut once, by its last query, as in the
    authors' code.

    Bytes: full precision for each kept token, and 16 of bookkeeping per token of a row.

    Args:
        budget: bytes per row.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    return evicting(
        budget, LastQuery(), GreedyTiers(), granularity="row", period_tokens=1, keep_newest=False, dtype=dtype
    )
