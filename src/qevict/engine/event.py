"""A routing event: rank, plan, and carry the plan out, for a stack of layers."""

import itertools
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from qevict.contracts.values import Costs, Windows
from qevict.engine import mover, tally
from qevict.engine.checks import check_plan, check_rankings
from qevict.engine.clock import Arrival
from qevict.engine.landing import Landing
from qevict.engine.records import Grid
from qevict.engine.stack import Stack
from qevict.engine.tally import Move, Tally
from qevict.engine.wiring import Wiring
from qevict.errors import BudgetExceededError


@attrs.frozen(eq=False)
class Event:
    """A planned event.

    Attributes:
        stack: the layers that are routed.
        move: the plan.
        foreseen: how much it moves, if the router knows.
        budgets: by layer and lane, bytes; None for no limit.
    """

    stack: Stack
    move: Move
    foreseen: Tally | None
    budgets: tuple[tuple[int | None, ...], ...]


def plan(stack: Stack, indices: Sequence[int], arrival: Arrival, landing: Landing) -> Event:
    """Rank the windows of some layers and decide where each shall live.

    Args:
        stack: the layers.
        indices: which of the model's owned layers they are.
        arrival: the forward that ends.
        landing: where its tokens fell.

    Raises:
        BudgetExceededError: the policy is strict, and a lane's protected tokens exceed its budget.
        ContractError: the scorer's rankings or the router's plan are not what their contracts say.
    """
    policy, grid = stack.wiring.policy, stack.records.grid()
    windows = stack.windows(grid, arrival)
    rankings = policy.scorer.rank(stack.state(grid), windows)
    check_rankings(policy.scorer.name, rankings, windows)
    by_row = [stack.wiring.lane_budgets(tokens) for tokens in arrival.after]
    budgets = tuple(tuple(stack.layers[0].lane_counts([row[index] for row in by_row])) for index in indices)
    capacities = [_capacity(stack.wiring, budget) for budget in itertools.chain(*budgets)]
    costs = Costs(stack.wiring.tier_bytes, _kept(stack, grid, windows))
    planned = policy.router.plan(rankings, windows, costs, capacities)
    check_plan(policy.router.name, planned, windows, len(policy.tiers))
    move = tally.prepare(stack, grid, planned, stack.for_every_layer(landing.rotary_offset))
    known = planned.counts if costs.kept is None else None  # where windows own codes, counts do not tell who moves
    foreseen = None if known is None else tally.foresee(stack, known, windows.candidates)
    return Event(stack, move, foreseen, budgets)


def _kept(stack: Stack, grid: Grid, windows: Windows) -> Tensor | None:
    """Codes that windows would keep in a hotter tier; None while there are none."""
    if not stack.coded:
        return None
    policy = stack.wiring.policy
    held = tally.tier_codes(stack.wiring, grid.spread(stack.records.slots) >= 0) & windows.candidate[..., None]
    return policy.ledger.retain(held, torch.zeros_like(windows.place), len(policy.tiers))


def _capacity(wiring: Wiring, budget: int | None) -> int | None:
    check_reserve(wiring, budget)
    return wiring.capacity(budget)


def check_reserve(wiring: Wiring, budget: int | None) -> None:
    """A strict policy holds no more than its budget.

    Raises:
        BudgetExceededError: the policy is strict, and a lane's protected tokens exceed its budget.
    """
    reserve = wiring.reserve_bytes
    if wiring.policy.strict and budget is not None and budget < reserve:
        msg = (
            f"the protected tokens of a lane take {reserve} bytes, its budget is {budget}; raise the budget, "
            f"protect fewer sinks or recent tokens, or use strict=False"
        )
        raise BudgetExceededError(msg)


def carry_out(event: Event, counted: Tally, arrival: Arrival, landing: Landing) -> None:
    """Move what was planned, and leave room for the tokens until the next event."""
    stack, wiring = event.stack, event.stack.wiring
    first = stack.layers[0]
    tokens, left = first.lane_counts(arrival.after), first.lane_counts(arrival.left)
    goals = [wiring.windows_until(own + more) for own, more in zip(tokens, left, strict=True)] * len(stack.layers)
    room = [max(opened, goal) for opened, goal in zip(stack.records.opened, goals, strict=True)]
    needed = [_needed_bytes(stack, index, counted, room) for index in range(len(stack.layers))]
    allowed = [None if _unlimited(wiring, arrival) else _allowed_bytes(wiring, own, tokens) for own in event.budgets]
    if wiring.policy.router.scope == "model":
        allowed = _together(allowed, needed)
    spare = [None if most is None else most - need for most, need in zip(allowed, needed, strict=True)]
    mover.apply(stack, event.move, counted, room, spare)
    for layer, most in zip(stack.layers, allowed, strict=True):
        mover.shrink(layer, most)
    stack.hide(stack.for_every_layer(landing.lengths))


def _unlimited(wiring: Wiring, arrival: Arrival) -> bool:
    """Nothing holds the cache to its budget: it bills otherwise, or was compressed once and grows from there."""
    policy = wiring.policy
    return policy.accounting == "paper" or (policy.route_at == "prompt" and not arrival.in_prompt)


def _together(allowed: Sequence[int | None], needed: Sequence[int]) -> list[int | None]:
    """Layers that share bytes: each may have what it needs, and an equal part of what all leave over."""
    limits = [own for own in allowed if own is not None]
    if len(limits) < len(allowed):
        return list(allowed)
    left = (sum(limits) - sum(needed)) // len(limits)
    return [need + left for need in needed]


def _allowed_bytes(wiring: Wiring, budgets: Sequence[int | None], tokens: Sequence[int]) -> int | None:
    """Bytes that a layer may have allocated; None where nothing limits it."""
    if all(budget is None for budget in budgets):
        return None
    lanes = zip(budgets, tokens, strict=True)
    return sum(
        wiring.whole_lane_bytes(own) if budget is None else max(budget, wiring.reserve_bytes) for budget, own in lanes
    )


def _needed_bytes(stack: Stack, index: int, counted: Tally, room: Sequence[int]) -> int:
    """Bytes that a layer takes after the move, without slack."""
    wiring = stack.wiring
    new = sum(stack.of_layer(room, index)) - sum(stack.of_layer(stack.records.opened, index))
    live = [sum(stack.of_layer(lanes, index)) for lanes in counted.live]
    blocks = sum(count * slot for count, slot in zip(live, wiring.slot_bytes, strict=True)) + new * wiring.slot_bytes[0]
    lines = sum(sum(stack.of_layer(lanes, index)) for lanes in counted.counts) + new
    return blocks + lines * wiring.record_bytes + stack.lanes_per_layer * (wiring.sink_bytes + wiring.lane_bytes)
