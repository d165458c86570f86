"""What code written for papers does with a mixed cache: rebuild all of it for every query."""

from typing import ClassVar

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from qevict.backends.reference import Gathered, gather
from qevict.contracts.backend import Attended, AttentionBackend, Query, View
from qevict.contracts.values import Need
from qevict.shapes import Mass


@attrs.frozen
class NaiveRebuild(AttentionBackend):
    """Decodes all codes, turns all keys, concatenates, and attends with ``enable_gqa``; masses are a second softmax.

    It holds the same tiers as the policy that it stands in for. The second pass runs at every decoding step, since the
    score counts every query. Log-sum-exps are not computed: nothing here reads them.
    """

    name: ClassVar[str] = "naive rebuild"
    provides: ClassVar[frozenset[Need]] = frozenset({Need.MASS, Need.KEYS, Need.VALUES})

    def attend(self, query: Query, view: View, *, want_mass: bool) -> Attended:
        """One call of scaled_dot_product_attention over the rebuilt cache."""
        held, dtype = gather(view), query.vectors.dtype
        heads = query.vectors.flatten(1, 2)
        keys, values = held.keys.to(dtype), held.values.to(dtype)
        allowed = _allowed(query, held)[:, None]
        output = F.scaled_dot_product_attention(
            heads, keys, values, attn_mask=allowed, scale=query.scaling, enable_gqa=True
        )
        lse = torch.full(query.vectors.shape[:4], torch.nan, device=heads.device)
        mass = _mass(query, held) if want_mass else None
        return Attended(output.view(query.vectors.shape), lse, mass)

    def mass(self, query: Query, view: View) -> Mass:
        """The second pass alone, over the rebuilt cache."""
        return _mass(query, gather(view))


def _allowed(query: Query, held: Gathered) -> Tensor:
    """``[lanes, queries, tokens]``."""
    return held.present[:, None] & (held.positions[:, None] <= query.positions[..., None])


def _mass(query: Query, held: Gathered) -> Mass:
    logits = query.vectors.float() @ held.keys.transpose(-1, -2)[:, :, None] * query.scaling
    probability = logits.masked_fill_(~_allowed(query, held)[:, None, None], -torch.inf).softmax(-1)
    tokens = probability.nan_to_num_(0.0).sum(3).flatten(1, 2)
    windows: Mass = tokens[..., held.sinks :].unflatten(-1, (-1, held.window)).sum(-1)
    return windows
