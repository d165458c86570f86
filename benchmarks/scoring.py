"""Ways to score a prompt, from none to all queries."""

import attrs

from qevict import policies
from qevict.policy import Policy
from qevict.scorers.recency import Recency

NONE = "no masses"


def scorings(budget: str) -> dict[str, Policy]:
    """QEvict with its scores started in different ways; without masses it stores, routes and packs all the same."""
    return {
        NONE: attrs.evolve(policies.qevict(budget), scorer=Recency()),
        "masses of the last 32 queries": policies.qevict(budget, prompt_queries=32),
        "masses of all queries": policies.qevict(budget),
    }
