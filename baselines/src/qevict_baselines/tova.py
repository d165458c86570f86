"""TOVA: Transformers are Multi-State RNNs (arXiv 2401.06104)."""

from typing import ClassVar

import attrs
import torch

from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.shapes import Scores
from qevict_baselines.accumulators import no_mass, with_masses


@attrs.frozen
class LastQuery(Scorer):
    """Attention of the latest query alone; what it does not look at is forgotten.

    TOVA (arXiv 2401.06104), section 3.2. Faithful: windows of one token, a period of one token, rows as lanes (the mean
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
