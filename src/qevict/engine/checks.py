"""What the engine asks of a part's answers: a glance at names, dtypes and shapes, never at numbers."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from qevict.contracts.scorer import State
from qevict.contracts.values import MovePlan, Windows
from qevict.errors import ContractError


def check_start(scorer: str, state: object) -> None:
    """Hold a scorer to its contract, by its state of one lane and one window.

    Raises:
        ContractError: it is no mapping of names to fp32 tensors over both.
    """
    found = _named(scorer, state, state.keys() if isinstance(state, Mapping) else ())
    behind = {name: column.shape[2:] if isinstance(column, Tensor) else () for name, column in found.items()}
    _check_columns(scorer, found, (1, 1), behind)


def check_state(scorer: str, state: object, old: State, axes: tuple[int, int]) -> None:
    """Hold a scorer to its contract.

    Args:
        scorer: its name.
        state: what it returned.
        old: the columns that the engine holds.
        axes: lanes and windows that it was shown.

    Raises:
        ContractError: the new state has other names or shapes, or is not fp32.
    """
    found = _named(scorer, state, old.keys())
    _check_columns(scorer, found, axes, {name: column.shape[1:] for name, column in old.items()})


def _named(scorer: str, state: object, names: Collection[str]) -> Mapping[str, object]:
    if not isinstance(state, Mapping) or state.keys() != names:
        given = sorted(state) if isinstance(state, Mapping) else f"a {type(state).__name__}"
        msg = f"scorer {scorer!r} must return a state with the names that it starts with, {sorted(names)}; got {given}"
        raise ContractError(msg)
    return state


def _check_columns(
    scorer: str, state: Mapping[str, object], axes: tuple[int, int], behind: Mapping[str, tuple[int, ...]]
) -> None:
    for name, column in state.items():
        shape = (*axes, *behind[name])
        if not isinstance(column, Tensor) or column.dtype != torch.float32 or column.shape != shape:
            msg = (
                f"scorer {scorer!r} must keep its state in float32, over lanes and windows, shaped {shape}; "
                f"its state {name!r} is {_form(column)}"
            )
            raise ContractError(msg)


def check_rankings(scorer: str, rankings: object, windows: Windows) -> None:
    """Hold a scorer to its contract.

    Raises:
        ContractError: a ranking is missing, not fp32, or not one value per window.
    """
    if not isinstance(rankings, Mapping):
        msg = f"scorer {scorer!r} must return rankings by name, {{'importance': ...}}; got a {type(rankings).__name__}"
        raise ContractError(msg)
    for name, ranking in rankings.items():
        if (
            not isinstance(ranking, Tensor)
            or ranking.dtype != torch.float32
            or ranking.shape != windows.positions.shape
        ):
            msg = (
                f"scorer {scorer!r} must rank in float32, one value per window {tuple(windows.positions.shape)}; "
                f"its ranking {name!r} is {_form(ranking)}"
            )
            raise ContractError(msg)
    if not rankings:
        msg = f"scorer {scorer!r} returned no ranking; return at least {{'importance': ...}}"
        raise ContractError(msg)


def check_plan(router: str, plan: object, windows: Windows, tiers: int) -> None:
    """Hold a router to its contract.

    Raises:
        ContractError: no plan, places that are not one whole number per window, or counts not by lane and tier.
    """
    if not isinstance(plan, MovePlan):
        msg = f"router {router!r} must return a MovePlan, got a {type(plan).__name__}"
        raise ContractError(msg)
    place, shape = plan.place, windows.place.shape
    if not isinstance(place, Tensor) or place.is_floating_point() or place.shape != shape:
        msg = f"router {router!r} must give each window a tier, whole numbers {tuple(shape)}; got {_form(place)}"
        raise ContractError(msg)
    if plan.counts is not None and [*map(len, plan.counts)] != [tiers] * len(windows.candidates):
        msg = f"router {router!r} must count by lane and tier, {len(windows.candidates)} times {tiers}; or return None"
        raise ContractError(msg)


def check_parts(router: str, parts: object, layers: int, total: int) -> None:
    """Hold a router to its contract.

    Raises:
        ContractError: it does not split a row's bytes over the layers.
    """
    whole = [part for part in parts if isinstance(part, int) and part >= 0] if isinstance(parts, tuple) else []
    if not isinstance(parts, tuple) or len(whole) != len(parts) or len(parts) != layers or sum(whole) > total:
        msg = f"router {router!r} must split {total} bytes into {layers} whole numbers, none negative; got {parts!r}"
        raise ContractError(msg)


def _form(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
