"""What this distribution offers, by the hooks of qevict."""

from collections.abc import Callable, Iterable

from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import Scorer
from qevict.policy import Policy
from qevict.registry import hookimpl
from qevict_baselines.accumulators import DecayedAttention, NormalisedAttention
from qevict_baselines.adakv import AdaptiveHeads
from qevict_baselines.criticalkv import AdaptiveTwoStages, TwoStages
from qevict_baselines.defensivekv import SafeThenWorstCase
from qevict_baselines.expected_attention import ExpectedAttention
from qevict_baselines.h2o import HeavyAndRecent
from qevict_baselines.handover import Handover
from qevict_baselines.keydiff import KeyDiff
from qevict_baselines.keynorm import ShortKeys
from qevict_baselines.output_norms import OutputNorms
from qevict_baselines.pyramidkv import PyramidShares
from qevict_baselines.random_scores import RandomScores
from qevict_baselines.snapkv import ObservationWindow
from qevict_baselines.tova import LastQuery
from qevict_baselines.worst_case import WorstCase


@hookimpl
def qevict_scorers() -> Iterable[type[Scorer]]:
    """Scorers that papers add."""
    return [
        DecayedAttention,
        ExpectedAttention,
        Handover,
        KeyDiff,
        LastQuery,
        NormalisedAttention,
        ObservationWindow,
        OutputNorms,
        RandomScores,
        ShortKeys,
        WorstCase,
    ]


@hookimpl
def qevict_routers() -> Iterable[type[TierRouter]]:
    """Routers that papers add."""
    return [AdaptiveHeads, AdaptiveTwoStages, HeavyAndRecent, PyramidShares, SafeThenWorstCase, TwoStages]


@hookimpl
def qevict_presets() -> Iterable[Callable[..., Policy]]:
    """Each paper's method as a whole."""
    return []
