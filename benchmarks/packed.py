"""The best that stock torch does for one-token queries: nothing is copied, and query heads share a read of their keys.

Keys and values stand in buffers with room to grow, so that no step concatenates. The query heads of one KV head are
laid along the query axis of scaled_dot_product_attention, which then streams every key once.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "packed_sdpa"
"""Name of the attention implementation."""

ROOM_TOKENS = 64
"""Room behind a new buffer, beside a sixteenth of what it holds."""


class PackedLayer(CacheLayerMixin):
    """One layer's buffers.

    Args:
        room_tokens: tokens that may come before the buffers are laid out anew.
    """

    is_sliding = False

    def __init__(self, room_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.room_tokens, self.tokens = room_tokens, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty buffers of the right kind."""
        rows, heads, _, head_dim = key_states.shape
        self.keys, self.values = (new.new_empty(rows, heads, 0, head_dim) for new in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens behind the others; returns views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        until = self.tokens + key_states.shape[2]
        assert self.keys is not None
        assert self.values is not None
        if until > self.keys.shape[2]:
            self.keys, self.values = (self._roomier(old, until) for old in (self.keys, self.values))
        self.keys[:, :, self.tokens : until] = key_states
        self.values[:, :, self.tokens : until] = value_states
        self.tokens = until
        return self.keys[:, :, :until], self.values[:, :, :until]

    def _roomier(self, old: Tensor, until: int) -> Tensor:
        new = old.new_empty(*old.shape[:2], until + until // 16 + self.room_tokens, old.shape[3])
        new[:, :, : self.tokens] = old[:, :, : self.tokens]
        return new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks speak of what was written."""
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens written."""
        return self.tokens

    def get_max_length(self) -> int:
        """No limit."""
        return -1


def packed_cache(model: Any, room_tokens: int = ROOM_TOKENS) -> Cache:
    """An empty cache for a model whose attention implementation is :data:`NAME`."""
    return Cache(layers=[PackedLayer(room_tokens) for _ in range(model.config.num_hidden_layers)])


def register() -> None:
    """Make the implementation known to transformers; doing it twice changes nothing."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it; longer queries go the usual way."""
    if query.shape[2] > 1:
        output: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return output
    grouped = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    packed = F.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=kwargs.get("scaling"))
    return packed.flatten(1, 2)[:, None], None
