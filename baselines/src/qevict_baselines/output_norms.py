"""CriticalKV's scores: Optimizing KV Cache Eviction from an Output Perturbation Perspective (arXiv 2502.03805)."""

from typing import ClassVar

import attrs
import torch

from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.errors import PolicyError
from qevict.shapes import Scores
from qevict_baselines.criticalkv import ATTENTION
from qevict_baselines.snapkv import ObservationWindow

_NORMS = "norms"


def _of_masses(_instance: object, _attribute: "attrs.Attribute[Scorer]", base: Scorer) -> None:
    more = base.needs - OutputNorms.needs
    if more:
        names = ", ".join(sorted(each.value for each in more))
        msg = f"OutputNorms shows its base no {names}, which {base.name!r} needs; take a base of attention masses"
        raise PolicyError(msg)


@attrs.frozen
class OutputNorms(Scorer):
    """How much the layer's output would lose: a base score times the L1 norm of the value through ``W_O``.

    CriticalKV (arXiv 2502.03805), algorithm 1. Ranks twice, as its router reads it: "attention" is the base score A,
    for the first stage; the importance is ``(A + epsilon) * ||v W_O||_1``, for the second. The norm is the mean over
    the query heads that read the value.

    Faithful: windows of one token, lanes of one KV head, the base's observation window protected, so that the first
    stage is spent on the tokens before it (in NVIDIA's kvpress the window takes part and uses it up). Different: a
    longer window counts by the sum of its tokens' norms, a lane of several KV heads by the mean over heads.

    Args:
        base: a scorer of attention masses; SnapKV's (default), as in the paper.
        epsilon: 1e-4 (default) as in kvpress.

    Bytes: 4 per window and lane, and those of the base.
    """

    name: ClassVar[str] = "output_norms"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS, Need.FIRST_LOOKS, Need.VALUES, Need.OUTPUT_PROJECTION})
    base: Scorer = attrs.field(factory=ObservationWindow, validator=_of_masses)
    epsilon: float = 1e-4
    prompt_queries: int | None = attrs.field(init=False, repr=False)
    prompt_stride: int = attrs.field(init=False, repr=False)
    observe_tokens: int | None = attrs.field(init=False, repr=False)

    @prompt_queries.default
    def _prompt_queries(self) -> int | None:
        return self.base.prompt_queries

    @prompt_stride.default
    def _prompt_stride(self) -> int:
        return self.base.prompt_stride

    @observe_tokens.default
    def _observe_tokens(self) -> int | None:
        return self.base.observe_tokens

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing seen."""
        zeros = torch.zeros(lanes, windows, dtype=torch.float32, device=device)
        return {**_prefixed(self.base.start(lanes, windows, device)), _NORMS: zeros}

    def update(self, state: State, observation: Observation) -> State:
        """Add the norms of the new values, and show the base what there is of masses."""
        assert observation.output is not None
        assert observation.values is not None
        norms = observation.output.norms(observation.values).mean(dim=(1, 2))
        own = {_NORMS: state[_NORMS] + observation.sum_by_window(norms)}
        if observation.mass is None:
            return {**state, **own}
        return {**_prefixed(self.base.update(_of_base(state), observation)), **own}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """Rank by attention, and by attention times the norm."""
        attention = self.base.rank(_of_base(state), windows)[IMPORTANCE]
        return {ATTENTION: attention, IMPORTANCE: (attention + self.epsilon) * state[_NORMS]}


def _prefixed(state: State) -> State:
    return {f"base {name}": array for name, array in state.items()}


def _of_base(state: State) -> State:
    return {name.removeprefix("base "): array for name, array in state.items() if name != _NORMS}
