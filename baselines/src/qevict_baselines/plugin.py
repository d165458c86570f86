"""What this distribution offers, by the hooks of qevict."""

from collections.abc import Callable, Iterable

from qevict.contracts.quantizer import Quantizer
from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import Scorer
from qevict.policy import Policy
from qevict.registry import hookimpl
from qevict_baselines.accumulators import DecayedAttention, NormalisedAttention
from qevict_baselines.adakv import AdaptiveHeads, adakv
from qevict_baselines.compositions import (
    ada_qevict,
    critical_qevict,
    decayed_qevict,
    defensive_qevict,
    diverse_qevict,
    handover_qevict,
    normalised_qevict,
    per_head_qevict,
    pyramid_qevict,
)
from qevict_baselines.criticalkv import AdaptiveTwoStages, OutputNorms, TwoStages, ada_criticalkv, criticalkv
from qevict_baselines.defensivekv import SafeThenWorstCase, WorstCase, defensivekv, layer_defensivekv
from qevict_baselines.expected_attention import ExpectedAttention, expected_attention
from qevict_baselines.h2o import HeavyAndRecent, h2o, observed_attention
from qevict_baselines.handover import Handover
from qevict_baselines.keydiff import KeyDiff, keydiff
from qevict_baselines.keynorm import ShortKeys, key_norms
from qevict_baselines.kivi import kivi
from qevict_baselines.kvquant import CalibratedKeys, CalibratedValues, FittedKeys, FittedValues, kvquant, nuq
from qevict_baselines.kvzip import Reconstruction, kvzip
from qevict_baselines.oscar import oscar
from qevict_baselines.plain import int2, int3, int4, int8
from qevict_baselines.pyramidkv import PyramidShares, pyramidkv
from qevict_baselines.random_scores import RandomScores, random_eviction
from qevict_baselines.snapkv import ObservationWindow, PooledHeads, snapkv
from qevict_baselines.streaming_llm import streaming_llm
from qevict_baselines.tova import LastQuery, tova
from qevict_baselines.zipcache import ProbeSaliency, SalientShare, zipcache


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
        PooledHeads,
        ProbeSaliency,
        RandomScores,
        Reconstruction,
        ShortKeys,
        WorstCase,
    ]


@hookimpl
def qevict_quantizers() -> Iterable[type[Quantizer]]:
    """Quantizers that papers add."""
    return [CalibratedKeys, CalibratedValues, FittedKeys, FittedValues]


@hookimpl
def qevict_routers() -> Iterable[type[TierRouter]]:
    """Routers that papers add."""
    return [AdaptiveHeads, AdaptiveTwoStages, HeavyAndRecent, PyramidShares, SafeThenWorstCase, SalientShare, TwoStages]


@hookimpl
def qevict_presets() -> Iterable[Callable[..., Policy]]:
    """Each paper's method as a whole, and compositions of their parts."""
    return [
        ada_criticalkv,
        ada_qevict,
        adakv,
        critical_qevict,
        criticalkv,
        decayed_qevict,
        defensive_qevict,
        defensivekv,
        diverse_qevict,
        expected_attention,
        h2o,
        handover_qevict,
        int2,
        int3,
        int4,
        int8,
        key_norms,
        keydiff,
        kivi,
        kvquant,
        kvzip,
        layer_defensivekv,
        normalised_qevict,
        nuq,
        observed_attention,
        oscar,
        per_head_qevict,
        pyramid_qevict,
        pyramidkv,
        random_eviction,
        snapkv,
        streaming_llm,
        tova,
        zipcache,
    ]
