"""Compositions that no paper has: parts of some methods under the tiers of another. Each is a few lines.

All stand on QEvict (arXiv 2608.05326), with its defaults where nothing else is said: windows of 8 tokens, events every
8 tokens, 5 sinks and 32 recent tokens, 30 % of the bytes in full precision and 70 % as INT2 codes. Bytes are those of
QEvict's tiers; what a preset states is bookkeeping per window in full precision, of which codes take 7 less.
"""

import attrs
import torch

from qevict.contracts.budget import Budget
from qevict.policies import qevict
from qevict.policy import Policy
from qevict_baselines.accumulators import DecayedAttention, NormalisedAttention
from qevict_baselines.adakv import AdaptiveHeads
from qevict_baselines.criticalkv import OutputNorms, TwoStages
from qevict_baselines.defensivekv import SafeThenWorstCase, WorstCase
from qevict_baselines.handover import Handover
from qevict_baselines.pyramidkv import PyramidShares
from qevict_baselines.snapkv import ObservationWindow

SHARES = (0.3, 0.7)
"""Part of the bytes in full precision and as codes; QEvict's."""


def per_head_qevict(budget: Budget | str, *, dtype: torch.dtype | None = None) -> Policy:
    """QEvict in which every KV head decides for itself.

    Bytes: 27 of bookkeeping per window and KV head.
    """
    return attrs.evolve(qevict(budget, dtype=dtype), granularity="kv_head")


def ada_qevict(budget: Budget | str, *, alpha: float = 0.2, dtype: torch.dtype | None = None) -> Policy:
    """QEvict's score and tiers; in each tier, heads share the layer's bytes as in AdaKV (arXiv 2407.11550).

    Bytes: 27 of bookkeeping per window and KV head, ragged over the heads.
    """
    return attrs.evolve(per_head_qevict(budget, dtype=dtype), router=AdaptiveHeads(SHARES, alpha))


def pyramid_qevict(budget: Budget | str, *, beta: float = 20, dtype: torch.dtype | None = None) -> Policy:
    """QEvict with PyramidKV's shares of the layers (arXiv 2406.02069).

    Bytes: 27 of bookkeeping per window of a row.
    """
    base = qevict(budget, dtype=dtype)
    return attrs.evolve(base, router=PyramidShares(base.router, beta))


def critical_qevict(budget: Budget | str, *, dtype: torch.dtype | None = None) -> Policy:
    """CriticalKV's two stages (arXiv 2502.03805) for each of QEvict's tiers, over what the last 32 queries attend to.

    Bytes: 31 of bookkeeping per window and KV head.
    """
    scorer = OutputNorms(ObservationWindow(kernel=1))
    return attrs.evolve(per_head_qevict(budget, dtype=dtype), scorer=scorer, router=TwoStages(SHARES))


def defensive_qevict(budget: Budget | str, *, dtype: torch.dtype | None = None) -> Policy:
    """DefensiveKV's worst case (arXiv 2510.13334) for each of QEvict's tiers; risks are those of the prompt.

    Bytes: 35 of bookkeeping per window and KV head, ragged over the heads.
    """
    router = SafeThenWorstCase(SHARES, observed_windows=4)
    return attrs.evolve(per_head_qevict(budget, dtype=dtype), scorer=WorstCase(kernel=1), router=router)


def decayed_qevict(budget: Budget | str, *, decay: float = 0.9, dtype: torch.dtype | None = None) -> Policy:
    """QEvict whose score fades from period to period; ``decay=0`` is windowed and looks at the last period alone.

    Bytes: 27 of bookkeeping per window of a row.
    """
    return attrs.evolve(qevict(budget, dtype=dtype), scorer=DecayedAttention(decay))


def normalised_qevict(budget: Budget | str, *, dtype: torch.dtype | None = None) -> Policy:
    """QEvict whose score is attention per query that could see the window, so that age is no merit.

    Bytes: 27 of bookkeeping per window of a row.
    """
    return attrs.evolve(qevict(budget, dtype=dtype), scorer=NormalisedAttention())


def handover_qevict(budget: Budget | str, *, share: float = 0.7, dtype: torch.dtype | None = None) -> Policy:
    """QEvict's tiers, filled by key diversity (arXiv 2504.15364) at the prompt's end and by cumulative attention.

    Bytes: 31 of bookkeeping per window of a row.
    """
    return attrs.evolve(qevict(budget, dtype=dtype), scorer=Handover(share))
