"""Policies that the plain model can follow."""

from hypothesis import strategies as st

from qevict.contracts.budget import Fraction, Tokens
from qevict.ledgers.migration_stable import MigrationStable
from qevict.policy import Policy, Tier
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.routers.greedy import GreedyTiers
from qevict.stores.memory import DeviceMemory
from tests.plain_scorers import Shuffled, Turning

FULL = Tier("full", store=DeviceMemory())


def coded(bits: int) -> Tier:
    return Tier(f"int{bits}", PerChannel(bits), PerToken(bits), store=DeviceMemory())


TIERS = {
    "evict": ((FULL,), (1.0,)),
    "two tiers": ((FULL, coded(4)), (0.5, 0.5)),
    "three tiers": ((FULL, coded(8), coded(4)), (0.4, 0.3, 0.3)),
    "codes only": ((coded(8), coded(2)), (0.6, 0.4)),
}
"""Tiers, hot to cold, and their shares."""


def policies(tiers: tuple[Tier, ...], shares: tuple[float, ...]) -> st.SearchStrategy[Policy]:
    """Sizes at which a hundred tokens keep all tiers busy."""
    return st.builds(
        Policy,
        scorer=st.sampled_from([Shuffled(), Turning()]),
        router=st.just(GreedyTiers(shares)),
        tiers=st.just(tiers),
        ledger=st.just(MigrationStable()),
        budget=st.sampled_from([None, None, *map(Tokens, (25, 40, 50, 60)), *map(Fraction, (0.4, 0.6, 0.8))]),
        window_tokens=st.sampled_from([2, 4, 4, 8]),
        period_tokens=st.integers(1, 9),
        sink_tokens=st.sampled_from([0, 3, 4]),
        recent_tokens=st.sampled_from([0, 1, 5, 8]),
        granularity=st.sampled_from(["row", "kv_head"]),
        min_tokens=st.sampled_from([0, 0, 0, 40]),
    )
