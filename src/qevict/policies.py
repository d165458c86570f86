"""Presets: the compositions of the field, one call each."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from qevict.contracts.budget import Accounting, Budget
from qevict.contracts.scorer import Scorer
from qevict.errors import PolicyError
from qevict.ledgers.migration_stable import MigrationStable
from qevict.policy import Policy, Tier
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.cumulative import CumulativeAttention
from qevict.scorers.recency import Recency
from qevict.stores.memory import DeviceMemory


def _compose(scorer: Scorer, *recoverable: Tier, shares: tuple[float, ...] = (1.0,), **options: Any) -> Policy:
    """Full precision on top, whatever else below, and the parts that all presets share."""
    return Policy(
        scorer=scorer,
        router=GreedyTiers(shares),
        tiers=(Tier("full", store=DeviceMemory()), *recoverable),
        ledger=MigrationStable(),
        **options,
    )


def full(*, dtype: torch.dtype | None = None) -> Policy:
    """Keep everything in full precision: the full cache, held by this library's own storage."""
    return _compose(Recency(), sink_tokens=0, recent_tokens=1, dtype=dtype)


def sinks_recent(
    budget: Budget | str, *, sink_tokens: int = 5, recent_tokens: int = 32, dtype: torch.dtype | None = None
) -> Policy:
    """Keep the first tokens and as many of the last as the budget holds, at original positions.

    StreamingLLM's rule (arXiv 2309.17453). Windows of 8 tokens leave together, at each routing event.
    """
    return _compose(Recency(), budget=budget, sink_tokens=sink_tokens, recent_tokens=recent_tokens, dtype=dtype)


def evict_only(
    budget: Budget | str,
    *,
    window_tokens: int = 8,
    period_tokens: int = 8,
    sink_tokens: int = 5,
    recent_tokens: int = 32,
    prompt_queries: int | None = None,
    dtype: torch.dtype | None = None,
) -> Policy:
    """QEvict without its recoverable tier: full precision or gone (R2 of the paper's diagnosis)."""
    return _compose(
        CumulativeAttention(prompt_queries),
        budget=budget,
        window_tokens=window_tokens,
        period_tokens=period_tokens,
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        dtype=dtype,
    )


def qevict(
    budget: Budget | str,
    *,
    bits: int = 2,
    quantized_share: float = 0.70,
    window_tokens: int = 8,
    period_tokens: int = 8,
    sink_tokens: int = 5,
    recent_tokens: int = 32,
    prompt_queries: int | None = None,
    accounting: Accounting = "exact",
    dtype: torch.dtype | None = None,
) -> Policy:
    """Recoverable quantized eviction (arXiv 2608.05326): full precision, INT2, evicted.

    Args:
        budget: bytes per row.
        bits: bits of the recoverable tier: 2, 3, 4 or 8.
        quantized_share: q, the part of the history's bytes that the recoverable tier gets.
        window_tokens: tokens routed together; the paper's 8.
        period_tokens: tokens between routing events; the paper's Omega, 8.
        sink_tokens: the paper's 5.
        recent_tokens: the paper's 32.
        prompt_queries: start the scores from the prompt's last n queries; None for all (the paper's reading).
        accounting: ``"paper"`` bills codes times 1.05 only, and so holds more bytes than it bills.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    if (
        isinstance(quantized_share, bool)
        or not isinstance(quantized_share, int | float)
        or not 0 <= quantized_share <= 1
    ):
        msg = f"quantized_share is the part of the bytes for the recoverable tier, in [0, 1]; got {quantized_share!r}"
        raise PolicyError(msg)
    recoverable = Tier(f"int{bits}", keys=PerChannel(bits), values=PerToken(bits), store=DeviceMemory())
    return _compose(
        CumulativeAttention(prompt_queries),
        recoverable,
        shares=(round(1 - quantized_share, 9), quantized_share),
        budget=budget,
        window_tokens=window_tokens,
        period_tokens=period_tokens,
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        accounting=accounting,
        dtype=dtype,
    )


def four_tiers(
    budget: Budget | str,
    *,
    shares: tuple[float, float, float] = (0.1, 0.45, 0.45),
    window_tokens: int = 8,
    period_tokens: int = 8,
    sink_tokens: int = 5,
    recent_tokens: int = 32,
    prompt_queries: int | None = None,
    dtype: torch.dtype | None = None,
) -> Policy:
    """QEvict with a step between: full precision, INT4, INT2, evicted.

    A window that cools is encoded in 4 bits first and in 2 bits from these; each of its codes is remembered, so that it
    moves between the tiers without a further error (arXiv 2608.05326 has one recoverable tier).

    Args:
        budget: bytes per row.
        shares: parts of the history's bytes for full precision, INT4 and INT2.
        window_tokens: tokens routed together.
        period_tokens: tokens between routing events.
        sink_tokens: first tokens, always in full precision.
        recent_tokens: last tokens, always in full precision.
        prompt_queries: start the scores from the prompt's last n queries; None for all.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    return _compose(
        CumulativeAttention(prompt_queries),
        *(Tier(f"int{bits}", keys=PerChannel(bits), values=PerToken(bits), store=DeviceMemory()) for bits in (4, 2)),
        shares=shares,
        budget=budget,
        window_tokens=window_tokens,
        period_tokens=period_tokens,
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        dtype=dtype,
    )


PRESETS: Final[Mapping[str, Callable[..., Policy]]] = MappingProxyType(
    {preset.__name__: preset for preset in (full, sinks_recent, evict_only, qevict, four_tiers)}
)
"""Every preset by its name, as files and the command line call it."""
