"""Axis names and tensor aliases used in every signature.

Axes: ``batch, q_heads, kv_heads, lanes, tokens, windows, window, head_dim``. A *lane* is the unit of routing: a row of
the batch, or a (row, KV head) pair. ``heads`` is the number of KV heads in one lane and ``group`` the number of query
heads that share a KV head, so ``heads * group`` query heads look at each lane.
"""

from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

Queries = Float[Tensor, "lanes heads group tokens head_dim"]
"""Queries of one forward, grouped by the KV head that they read."""

TokenVectors = Float[Tensor, "lanes heads tokens head_dim"]
"""Keys or values of one forward."""

BlockPool = Float[Tensor, "heads slots window head_dim"]
"""A pool of dense blocks, addressed by slot."""

LaneWindows = Int[Tensor, "lanes windows"]
"""An integer per window of each lane."""

LaneMask = Bool[Tensor, "lanes windows"]
"""A flag per window of each lane."""

Scores = Float32[Tensor, "lanes windows"]
"""A rank value per window, higher means keep; always fp32."""

Mass = Float32[Tensor, "lanes q_heads windows"]
"""Softmax probability summed over the tokens of a window and over the queries of a forward; per query head."""

MassByQuery = Float32[Tensor, "lanes q_heads queries windows"]
"""Softmax probability summed over the tokens of a window, by query head and query."""

LaneTokens = Int[Tensor, "lanes tokens"]
"""An integer per token of a forward (a true position, a window column)."""

PerLane = Int[Tensor, " lanes"]
"""An integer per lane."""
