"""Attention masses, added up otherwise than once and for all.

Not of one paper: forgetful forms of the sum of QEvict (arXiv 2608.05326, eq. 1) and of H2O (arXiv 2306.14048), and the
average that takes H2O's preference for old tokens away.
"""

from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.errors import PolicyError
from qevict.scorers.fields import at_least_one, at_least_one_or_none
from qevict.shapes import Scores


def no_mass(lanes: int, windows: int, device: torch.device) -> Tensor:
    """Sums of masses before the first."""
    return torch.zeros(lanes, windows, dtype=torch.float32, device=device)


def with_masses(sums: Tensor, observation: Observation, kept: float) -> Tensor:
    """Sums of masses with those of one more forward, averaged over the query heads of each lane.

    Args:
        sums: by lane and window.
        observation: what the forward showed, with ``Need.MASS`` and ``Need.FIRST_LOOKS``.
        kept: the share of the old sums that a lane's first masses behind an event leave.
    """
    if observation.first is not None:
        sums = torch.where(observation.first[:, None], sums * kept, sums)
    if observation.mass is None:
        return sums
    return sums.add(observation.mass.mean(dim=1), alpha=observation.stands_for)


def _share(_instance: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 0 <= value <= 1:
        msg = f"{attribute.name} is the share of the sum that a period leaves, from 0 (forget) to 1, got {value!r}"
        raise PolicyError(msg)


@attrs.frozen
class DecayedAttention(Scorer):
    """Attention mass in which older periods fade: the sum is multiplied by ``decay`` when a period begins.

    The sum of the prompt is the first to fade. With ``decay=1`` it is QEvict's cumulative attention (arXiv 2608.05326,
    eq. 1), with ``decay=0`` it is windowed: what counts are the masses since the last event alone.

    Args:
        decay: what a period leaves of the sum; 0.9 (default, no paper's) halves it within seven periods.
        prompt_queries: sum the prompt's masses over its last n queries only; None (default) for all of them.
        prompt_stride: of these queries look at every n-th only, each for n.
        observe_tokens: after the prompt, look at the last n tokens before each event only; None (default) for all.

    Bytes: 4 per window and lane.
    """

    name: ClassVar[str] = "decayed_attention"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS, Need.FIRST_LOOKS})
    decay: float = attrs.field(default=0.9, validator=_share)
    prompt_queries: int | None = attrs.field(default=None, validator=at_least_one_or_none)
    prompt_stride: int = attrs.field(default=1, validator=at_least_one)
    observe_tokens: int | None = attrs.field(default=None, validator=at_least_one_or_none)

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing seen."""
        return {"mass": no_mass(lanes, windows, device)}

    def update(self, state: State, observation: Observation) -> State:
        """Let the sum fade where a period begins, and add the forward's masses."""
        return {"mass": with_masses(state["mass"], observation, self.decay)}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """The faded sum."""
        return {IMPORTANCE: state["mass"]}


@attrs.frozen
class NormalisedAttention(Scorer):
    """Attention mass of a window per query that could see it.

    The average form of H2O's score (arXiv 2306.14048), as NVIDIA's kvpress has it: a plain sum favours old tokens,
    which more queries see. There it is computed once, of the prompt; here it goes on while decoding. A query counts as
    one that sees the window if it sees its first token.

    Bytes: 4 per window and lane.
    """

    name: ClassVar[str] = "normalised_attention"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS})

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing seen."""
        return {"mass": no_mass(lanes, windows, device)}

    def update(self, state: State, observation: Observation) -> State:
        """Add the forward's masses, averaged over the query heads of each lane."""
        return {"mass": with_masses(state["mass"], observation, kept=1.0)}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """The sum over the number of queries from the window's first token on."""
        queries = windows.lengths[:, None] - windows.positions
        return {IMPORTANCE: state["mass"] / queries.clamp(min=1)}
