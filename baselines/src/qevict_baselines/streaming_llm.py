"""StreamingLLM: Efficient Streaming Language Models with Attention Sinks (arXiv 2309.17453)."""

import torch

from qevict.contracts.budget import Budget
from qevict.contracts.values import Positions
from qevict.policy import Policy
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.recency import Recency
from qevict_baselines.composing import evicting


def streaming_llm(
    budget: Budget | str,
    *,
    sink_tokens: int = 4,
    positions: Positions = "cache_relative",
    dtype: torch.dtype | None = None,
) -> Policy:
    """Attention sinks and as many of the latest tokens as the budget holds, for all heads and layers alike.

    StreamingLLM (Xiao et al., arXiv 2309.17453). Faithful: what is kept, one token out for each that
    comes, and positions counted in the cache: the kept tokens stand side by side, the query behind them. Attention sees
    only differences of positions, so it is the sinks that turn, by as many positions as were evicted. Differs: a prompt
    is read with full attention and cut at its end, where the paper rolls through it.

    Bytes: full precision for each kept token, and 12 of bookkeeping per token of a row.

    Args:
        budget: bytes per row. The authors' code keeps 4 + 512 tokens; ``"516 tokens"`` are their bytes, which hold a
            few tokens less, since bookkeeping and room for the next token are paid from them.
        sink_tokens: the paper's 4.
        positions: "cache_relative" (default, the paper's), or "original", as kvpress has it.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    return evicting(
        budget,
        Recency(),
        GreedyTiers(),
        granularity="row",
        sink_tokens=sink_tokens,
        period_tokens=1,
        positions=positions,
        dtype=dtype,
    )
