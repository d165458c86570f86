"""Key diversity for what will be asked, attention for what is being said: two scorers that split what is kept.

Not of one paper: KeyDiff (arXiv 2504.15364), on keys before RoPE by default, and cumulative attention as QEvict
(arXiv 2608.05326, eq. 1).
"""

from typing import ClassVar, get_args

import attrs
import torch

from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.errors import PolicyError
from qevict.routers.filling import rank_candidates
from qevict.scorers.fields import at_least_one, at_least_one_or_none, one_of
from qevict.shapes import Scores
from qevict_baselines.accumulators import no_mass, with_masses
from qevict_baselines.keydiff import Domain, by_window

_DIFFERENCE, _MASS = "difference", "mass"


def _part(_instance: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 0 < value < 1:
        msg = f"{attribute.name} is the part of what is kept that key diversity chooses, between 0 and 1, got {value!r}"
        raise PolicyError(msg)


@attrs.frozen
class Handover(Scorer):
    """Key diversity chooses at the prompt's end and hands over to cumulative attention while decoding.

    Each of the two ranks the windows, and a window is as good as the better of its two places, each place divided by
    the part of what is kept that its ranking may fill. So whatever the budget holds, the ``share`` best by key
    diversity are in it, and the best by attention fill the rest; no scale of scores matters. Key diversity is judged
    once, at the prompt's end, where the question may not be known yet: what is decoded later lives by attention alone.

    Args:
        share: the part that key diversity may fill; 0.7 (default, no paper's: see benchmarks/scorers.py).
        domain: of KeyDiff; "pre_rope" (default) found facts best in an outside study of question-unseen scorers.
        prompt_queries: sum the prompt's masses over its last n queries only; None (default) for all of them.
        prompt_stride: of these queries look at every n-th only, each for n.
        observe_tokens: after the prompt, look at the last n tokens before each event only; None (default) for all.

    Bytes: 8 per window and lane.
    """

    name: ClassVar[str] = "handover"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS, Need.PROMPT, Need.ROTARY})
    share: float = attrs.field(default=0.7, validator=_part)
    domain: Domain = attrs.field(default="pre_rope", validator=one_of(*get_args(Domain)))
    prompt_queries: int | None = attrs.field(default=None, validator=at_least_one_or_none)
    prompt_stride: int = attrs.field(default=1, validator=at_least_one)
    observe_tokens: int | None = attrs.field(default=None, validator=at_least_one_or_none)

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing seen; the least diverse of all."""
        zeros = no_mass(lanes, windows, device)
        return {_DIFFERENCE: zeros - torch.inf, _MASS: zeros}

    def update(self, state: State, observation: Observation) -> State:
        """Add the forward's masses; where the prompt ends, judge the keys."""
        later = {**state, _MASS: with_masses(state[_MASS], observation, kept=1.0)}
        if observation.held is None:
            return later
        return {**later, _DIFFERENCE: by_window(observation, observation.held, self.domain)}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """Minus the better place of each window."""
        diverse = (rank_candidates(state[_DIFFERENCE], windows) + 1) / self.share
        attended = (rank_candidates(state[_MASS], windows) + 1) / (1 - self.share)
        return {IMPORTANCE: -torch.minimum(diverse, attended)}
