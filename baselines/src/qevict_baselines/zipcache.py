"""ZipCache's parts: saliency by a few probe queries, and more bits for the salient share of the tokens.

ZipCache: He et al., Accurate and Efficient KV Cache Quantization with Salient Token Identification (arXiv 2405.14256).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from operator import mul
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Costs, MovePlan, Need, Observation, Windows
from qevict.errors import PolicyError
from qevict.ledgers.re_encoding import ReEncoding
from qevict.policy import Policy, Tier
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.routers.filling import best, counted, fill, named, rank_candidates
from qevict.routers.sharing import UNLIMITED, Groups, exact, valid_part
from qevict.scorers.fields import at_least_one
from qevict.shapes import Scores
from qevict.stores.memory import DeviceMemory
from qevict_baselines.accumulators import no_mass

_MASS, _BEYOND = "mass", "beyond"


def zipcache(*, salient: float = 0.6, dtype: torch.dtype | None = None) -> Policy:
    """ZipCache, every token kept: 4 bits for the salient ones, 2 bits for the others, token by token and head by head.

    Faithful: saliency by probes, the split, keys on one grid per channel for each of the two kinds of tokens, values
    divided by their channels' scales and put on a grid per token, an event at the prompt's end and every 100 tokens,
    with the latest tokens in full precision between. Differs: values have a grid per token and KV head, where the
    paper's covers all heads; grids are fitted at the prompt's end and stay, where the authors encode the whole cache
    anew each time; keys are quantised before RoPE.

    Args:
        salient: part of the tokens that gets 4 bits; the paper's 0.6.
        dtype: dtype in which full precision is stored; None for the model's.

    Bytes per token and KV head of 64 channels: 68 with 4 bits, 36 with 2 (256 in full precision of 16 bits), and
    bookkeeping for each token and KV head besides; 384 once per KV head of a row for each of the two kinds.
    """
    tiers = (
        Tier(
            f"int{bits}", PerChannel(bits, scope="sequence"), PerToken(bits, channel_scaled=True), store=DeviceMemory()
        )
        for bits in (4, 2)
    )
    return Policy(
        scorer=ProbeSaliency(),
        router=SalientShare(salient),
        tiers=tuple(tiers),
        ledger=ReEncoding(),
        window_tokens=1,
        period_tokens=100,
        sink_tokens=0,
        recent_tokens=0,
        granularity="kv_head",
        dtype=dtype,
    )


@attrs.frozen
class ProbeSaliency(Scorer):
    """Attention of a window per probe query that sees it, summed over the query heads that share its key.

    ZipCache (arXiv 2405.14256): a sum over all queries favours early tokens, which more of them see, so it is divided
    by their number; and a tenth of the prompt's queries will do. Faithful: normalised by the probes that see a window,
    which are those from its first token on. Differs: the paper's probes are the latest 5 % of the queries and 5 %
    drawn at random, these are every tenth, counted backwards from the last; the authors' code divides by the number of
    all queries, not of the probes. Behind the prompt every query is a probe, as it is looked at anyway, where the code
    has the latest query alone. Where the prompt is read in pieces shorter than a window or than the stride, a
    window's probes may be counted wrong by one.

    Bytes: 8 per window and lane.

    Args:
        prompt_stride: every n-th of the prompt's queries is a probe; 10 (default) for as many as in the paper.
    """

    name: ClassVar[str] = "probe_saliency"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS, Need.POSITIONS})
    prompt_stride: int = attrs.field(default=10, validator=at_least_one)

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing seen."""
        return {_MASS: no_mass(lanes, windows, device), _BEYOND: no_mass(lanes, windows, device)}

    def update(self, state: State, observation: Observation) -> State:
        """Add the forward's masses, each for as many queries as it stands for; where the prompt ends, count these."""
        mass, beyond = state[_MASS], state[_BEYOND]
        if observation.mass is not None:
            mass = mass.add(observation.mass.sum(dim=1), alpha=observation.stands_for)
        if observation.ends_prompt:
            beyond = self._beyond(observation)
        return {_MASS: mass, _BEYOND: beyond}

    def _beyond(self, observation: Observation) -> Tensor:
        """Queries that a window's probes stand for, beyond those that there are from its first token on.

        The prompt's last query is always a probe, so that windows whose distance from it is no multiple of the stride
        are seen by one probe more than their part.
        """
        assert observation.positions is not None
        last = observation.columns[:, -1:]
        first = observation.positions.gather(1, last.clamp(min=0))
        length = first + (observation.columns == last).sum(dim=1, keepdim=True)
        beyond = (observation.positions - length) % self.prompt_stride
        within = (observation.positions >= 0) & (observation.positions < length) & (last >= 0)
        return torch.where(within, beyond, 0).float()

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """The sum over the number of queries that it stands for."""
        queries = windows.lengths[:, None] - windows.positions + state[_BEYOND]
        return {IMPORTANCE: state[_MASS] / queries.clamp(min=1)}


@attrs.frozen
class SalientShare(TierRouter):
    """A share of each lane's windows, the best ones, in the first of two tiers, and the others in the second.

    ZipCache (arXiv 2405.14256): of ``n`` windows the lowest ``int((1 - salient) * n)`` get fewer bits, and none is
    evicted, however many bytes that takes. Faithful: so it is without a budget, where the bytes follow from the share.
    Differs: at each event the whole context is ranked anew, where the authors' code ranks the latest tokens among
    themselves; and with a budget, as many of the best windows stay as fit into it when they are split like this.

    Stores two tiers' codes in place of ``4 * head_dim`` bytes per token and KV head at 16 bits.

    Args:
        salient: part of the windows that gets more bits; the paper's 0.6 (default).
    """

    name: ClassVar[str] = "salient_share"
    salient: float = attrs.field(default=0.6, validator=valid_part)

    def check(self, tiers: int) -> None:
        """Two tiers.

        Raises:
            PolicyError: there are fewer or more.
        """
        if tiers != 2:
            msg = f"router {self.name!r} splits windows over two tiers, got {tiers}; give two tiers, hot to cold"
            raise PolicyError(msg)

    def plan(
        self, rankings: Mapping[str, Tensor], windows: Windows, costs: Costs, capacities: Sequence[int | None]
    ) -> MovePlan:
        """The best in the first tier, the others in the second."""
        ranks = rank_candidates(named(rankings, IMPORTANCE, self), windows)
        room = [self._room(*lane, costs) for lane in zip(windows.candidates, capacities, strict=True)]
        place = fill(Groups(windows, self.scope), costs, room, partial(best, ranks))
        if all(capacity is None for capacity in capacities):
            costs = Costs(costs.tier_bytes)  # where there is room for all, codes that are kept take no place of others
        return MovePlan(place, counted(windows, costs, room))

    def _room(self, windows: int, capacity: int | None, costs: Costs) -> tuple[int, int]:
        """How many of a lane's windows each tier takes."""
        if capacity is None:
            return self._split(windows)[0], UNLIMITED
        few = range(windows + 1)
        return self._split(bisect_right(few, capacity, key=lambda stay: self._bytes(stay, costs)) - 1)

    def _bytes(self, windows: int, costs: Costs) -> int:
        return sum(map(mul, self._split(windows), costs.tier_bytes))

    def _split(self, windows: int) -> tuple[int, int]:
        """The others are ``int((1 - salient) * windows)``, in whole numbers."""
        rest = 1 - exact(self.salient)
        others = windows * rest.numerator // rest.denominator
        return windows - others, others
