"""What the presets of eviction methods have in common."""

from typing import Any

from qevict.contracts.budget import Budget
from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import Scorer
from qevict.ledgers.migration_stable import MigrationStable
from qevict.policy import Policy, Tier
from qevict.stores.memory import DeviceMemory


def evicting(budget: Budget | str, scorer: Scorer, router: TierRouter, **options: Any) -> Policy:  # noqa: ANN401 - fields of a policy
    """Full precision or gone, token by token and head by head, with nothing protected, unless options say otherwise."""
    chosen: dict[str, Any] = {
        "window_tokens": 1,
        "sink_tokens": 0,
        "recent_tokens": 0,
        "granularity": "kv_head",
    } | options
    tiers = (Tier("full", store=DeviceMemory()),)
    return Policy(scorer=scorer, router=router, tiers=tiers, ledger=MigrationStable(), budget=budget, **chosen)
