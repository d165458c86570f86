"""What a policy will hold of a row, before there is a model or a token."""

import attrs
import torch

from qevict.contracts.values import PROTECTED, Costs, Windows
from qevict.engine.report import PROTECTED_TIER, bytes_by_tier
from qevict.engine.wiring import Wiring


@attrs.frozen
class Forecast:
    """What one row holds right after a prompt, over all its lanes and layers.

    Attributes:
        tokens: of the row.
        full_bytes: what a full cache in the stored dtype holds.
        budget_bytes: what the row may hold; None for no limit.
        floor_bytes: what no router sees: sinks, windows not ranked yet with room until the next event, bookkeeping.
        window_bytes: by tier, one window of one lane, bookkeeping included (in the policy's accounting).
        windows: by tier; ``"protected"`` counts those not ranked yet, without the room that a cache opens for the
            tokens to come.
        bytes_by_tier: exact bytes of these windows without bookkeeping; ``"protected"`` includes the sinks.
        evicted_windows: windows that find no place.
    """

    tokens: int
    full_bytes: int
    budget_bytes: int | None
    floor_bytes: int
    window_bytes: dict[str, int]
    windows: dict[str, int]
    bytes_by_tier: dict[str, int]
    evicted_windows: int


def forecast(wiring: Wiring, tokens: int) -> Forecast:
    """Let the router place the windows of a row of ``tokens`` tokens of which nothing was observed."""
    policy, lanes = wiring.policy, wiring.lanes_per_row * wiring.geometry.layers
    token_bytes = wiring.geometry.token_bytes * wiring.geometry.layers
    unranked = wiring.windows_until(tokens) - wiring.aged_until(tokens)
    *placed, evicted = _placed(wiring, tokens)
    windows = {PROTECTED_TIER: unranked * lanes}
    windows |= {tier.name: count for tier, count in zip(policy.tiers, placed, strict=True)}
    return Forecast(
        tokens=tokens,
        full_bytes=tokens * token_bytes,
        budget_bytes=None if policy.budget is None else policy.budget.row_bytes(tokens, token_bytes),
        floor_bytes=wiring.row_bytes + lanes * wiring.reserve_bytes,
        window_bytes={tier.name: cost for tier, cost in zip(policy.tiers, wiring.tier_bytes, strict=True)},
        windows=windows,
        bytes_by_tier=bytes_by_tier(wiring, windows, lanes * wiring.sink_bytes),
        evicted_windows=evicted,
    )


def _placed(wiring: Wiring, tokens: int) -> list[int]:
    """Windows by tier, and evicted, in all lanes of all layers."""
    policy, candidates, per_row = wiring.policy, wiring.aged_until(tokens), wiring.lanes_per_row
    capacities = [wiring.capacity(budget) for budget in wiring.lane_budgets(tokens) for _ in range(per_row)]
    lanes = len(capacities)
    positions = policy.sink_tokens + policy.window_tokens * torch.arange(candidates).expand(lanes, -1)
    everywhere = torch.ones_like(positions, dtype=torch.bool)
    windows = Windows(
        positions,
        everywhere,
        everywhere,
        torch.full_like(positions, PROTECTED),
        (candidates,) * lanes,
        lengths=torch.full((lanes,), tokens),
        layers=wiring.geometry.layers,
        lanes_per_row=per_row,
    )
    state = policy.scorer.start(lanes, candidates, positions.device)
    plan = policy.router.plan(policy.scorer.rank(state, windows), windows, Costs(wiring.tier_bytes), capacities)
    return plan.place.flatten().bincount(minlength=len(policy.tiers) + 1).tolist()
