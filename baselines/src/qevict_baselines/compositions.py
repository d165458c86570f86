"""Compositions that no paper has: parts of some methods under the tiers of another. Each is a few lines.

All stand on QEvict (arXiv 2608.05326), with its defaults where nothing else is said: windows of 8 tokens, events every
8 tokens, 5 sinks and 32 recent tokens, 30 % of the bytes in full precision and 70 % as INT2 codes. Bytes are those of
QEvict's tiers; what a preset states is bookkeeping per window in full precision, of which codes take 7 less.
"""

import attrs
import torch

from qevict.contracts.budget import Budget
from qevict.policies import qevict
from qevict.policy import Policy, Tier
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.routers.covering import CoverFirst
from qevict.stores.memory import DeviceMemory
from qevict_baselines.accumulators import DecayedAttention, NormalisedAttention
from qevict_baselines.adakv import AdaptiveHeads
from qevict_baselines.criticalkv import OutputNorms, TwoStages
from qevict_baselines.defensivekv import SafeThenWorstCase, WorstCase
from qevict_baselines.handover import Handover
from qevict_baselines.keydiff import KeyDiff
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


def diverse_qevict(
    budget: Budget | str,
    *,
    key_bits: int = 3,
    value_bits: int = 2,
    newest_tokens: int = 64,
    group_channels: int | None = 32,
    dtype: torch.dtype | None = None,
) -> Policy:
    """As many tokens as cheap codes can hold, chosen by key diversity.

    QEvict's windows and events with four parts exchanged, each for the bytes that it frees or the choice that it makes:

    * Codes of the same bits for less: keys centred, rotated and on grids per channel, values rotated and on grids per
      token over groups of channels, with scales that are codes of 4 bits themselves. A token of a KV head of 64
      channels takes 52 bytes, with keys of 3 bits and values of 2, where QEvict's takes 68 with 2 bits for both.
    * No recent tokens in full precision but those that wait for their event: the last ``newest_tokens`` rank first,
      and are codes as well. At 10 % of 900 tokens QEvict spends more than half of its bytes on sinks and recent tokens.
    * All bytes go to codes first (:class:`~qevict.routers.covering.CoverFirst`): full precision is for what is left
      over once every token is kept.
    * Windows are chosen by how much their keys, before RoPE, differ from the mean direction (KeyDiff, arXiv 2504.15364,
      on another domain than the paper's), so that what is asked later need not have been attended to already.

    Args:
        budget: bytes per row.
        key_bits: of a key's codes: 2, 3 (default), 4 or 8.
        value_bits: of a value's, 2 by default; what is looked up by keys suffers more from coarse ones.
        newest_tokens: last tokens that rank before all others.
        group_channels: channels of a value that share a grid, which must divide those of a head; None for all of them.
        dtype: dtype in which full precision is stored; None for the model's.

    Bytes: 27 of bookkeeping per window of a row, and 128 once per KV head of 64 channels.
    """
    keys = PerChannel(key_bits, scale_bits=4, centred=True, rotated=True)
    values = PerToken(value_bits, scale_bits=4, rotated=True, group_channels=group_channels)
    base = qevict(budget, recent_tokens=1, dtype=dtype)
    tiers = base.tiers[0], Tier("codes", keys, values, store=DeviceMemory())
    return attrs.evolve(base, scorer=KeyDiff("pre_rope", newest_tokens), router=CoverFirst(), tiers=tiers)
