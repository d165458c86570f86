"""PyramidKV: the lower layers get more of the bytes, the upper ones less."""

import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.budget import Budget
from qevict.contracts.router import LayerBounds, Scope, TierRouter
from qevict.contracts.values import Costs, Geometry, MovePlan, RouteAt, Windows
from qevict.errors import PolicyError
from qevict.policy import Policy
from qevict.routers.greedy import GreedyTiers
from qevict.routers.sharing import exact
from qevict_baselines.composing import evicting
from qevict_baselines.pooling import Pool
from qevict_baselines.snapkv import ObservationWindow


def _at_least_one(_instance: object, _attribute: object, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < float("inf"):
        msg = f"beta says how many times less than the mean the last layer gets, at least 1; got {value!r}"
        raise PolicyError(msg)


@attrs.frozen
class PyramidShares(TierRouter):
    """Bytes fall from the first layer to the last; what happens in a layer another router decides.

    PyramidKV (Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, arXiv
    2406.02069). With ``base`` the mean of what layers get beyond what they take at least, the last layer
    gets ``base / beta``, the first ``2 base - base / beta``, and those between lie on a line; where the first would
    get more than it can use, it gets that, and the last ``2 base`` less that. What layers take at least comes on top
    for each, as the observation window does in the paper.

    Faithful: the line and its ends. Differs: it is in bytes; its parts add up to the whole budget, where the authors'
    whole steps overshoot it; equal parts come where the mean is at most what layers take at least, or at least what
    they can use, and not for prompts shorter than twice the mean, as in the authors' code.

    Args:
        within: routes inside the layers.
        beta: how many times less than the mean the last layer gets; the authors' 20.
    """

    name: ClassVar[str] = "pyramid"
    within: TierRouter = attrs.field(factory=GreedyTiers)
    beta: float = attrs.field(default=20, validator=_at_least_one)
    scope: Scope = attrs.field(init=False, repr=False)
    rankings: tuple[str, ...] = attrs.field(init=False, repr=False)
    earlier_wins: bool = attrs.field(init=False, repr=False)

    @scope.default
    def _scope(self) -> Scope:
        return self.within.scope

    @rankings.default
    def _rankings(self) -> tuple[str, ...]:
        return self.within.rankings

    @earlier_wins.default
    def _earlier_wins(self) -> bool:
        return self.within.earlier_wins

    def share(self, total_bytes: int, geometry: Geometry, bounds: LayerBounds) -> tuple[int, ...]:
        """A line from the first layer to the last."""
        base = Fraction(total_bytes, geometry.layers) - bounds.least_bytes
        usable = bounds.most_bytes - bounds.least_bytes
        if not 0 < base < usable or geometry.layers == 1:
            return self.within.share(total_bytes, geometry, bounds)
        first = min(2 * base - base / exact(self.beta), Fraction(usable))
        step = 2 * (first - base) / (geometry.layers - 1)
        parts = (bounds.least_bytes + first - step * layer for layer in range(geometry.layers))
        ends = [0, *map(int, itertools.accumulate(parts))]
        return tuple(end - start for start, end in itertools.pairwise(ends))

    def check(self, tiers: int) -> None:
        """Whatever the router within serves."""
        self.within.check(tiers)

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        """As the router within."""
        return self.within.plan(rankings, windows, costs, capacities)


def pyramidkv(
    budget: Budget | str,
    *,
    observed_tokens: int = 32,
    kernel: int = 5,
    pool: Pool = "average",
    beta: float = 20,
    route_at: RouteAt = "prompt",
    dtype: torch.dtype | None = None,
) -> Policy:
    """SnapKV's choice within a layer; the lower layers get more of the bytes.

    PyramidKV (Cai et al., arXiv 2406.02069): see :class:`PyramidShares` and
    :class:`~qevict_baselines.snapkv.ObservationWindow`.

    Bytes: full precision for each kept token, and 16 of bookkeeping per token and KV head.

    Args:
        budget: bytes per row, over all layers.
        observed_tokens: the observation window, which every layer keeps; 32 as in the authors' later code.
        kernel: 5 as in the authors' code.
        pool: "average" as in the authors' code.
        beta: how many times less than the mean the last layer gets; the authors' 20.
        route_at: "prompt" (default, the paper's), or "period" to hold the budget while decoding.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    scorer = ObservationWindow(observed_tokens, kernel, pool)
    return evicting(
        budget, scorer, PyramidShares(beta=beta), recent_tokens=observed_tokens, route_at=route_at, dtype=dtype
    )
