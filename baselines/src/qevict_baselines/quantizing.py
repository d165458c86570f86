"""What the presets of quantisation methods have in common."""

from typing import Any

from qevict.contracts.quantizer import Quantizer
from qevict.ledgers.migration_stable import MigrationStable
from qevict.policy import Policy, Tier
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.recency import Recency
from qevict.stores.memory import DeviceMemory


def quantizing(name: str, keys: Quantizer, values: Quantizer, **options: Any) -> Policy:  # noqa: ANN401 - fields of a policy
    """Every token is kept; windows become codes for good as they leave the recent tokens, whenever one does."""
    chosen: dict[str, Any] = {"period_tokens": 1, "sink_tokens": 0} | options
    return Policy(
        scorer=Recency(),
        router=GreedyTiers(),
        tiers=(Tier(name, keys, values, store=DeviceMemory()),),
        ledger=MigrationStable(),
        **chosen,
    )
