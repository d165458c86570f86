"""The output projection of an attention layer as a value: what a value vector does to the layer's output."""

import attrs
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from qevict.shapes import TokenVectors

_SCRATCH_ELEMENTS = 2**24


@attrs.frozen(eq=False)
class OutputProjection:
    """``W_O`` of one layer, cut into the slices that the query heads write through.

    Attributes:
        weight: ``weight[h]`` takes what query head ``h`` has gathered to its part of the layer's output.
        kv_heads: KV heads of the layer; query head ``h`` reads KV head ``h // (q_heads / kv_heads)``.
    """

    weight: Float[Tensor, "q_heads head_dim hidden"]
    kv_heads: int

    @torch.no_grad()
    def norms(self, values: TokenVectors) -> Float32[Tensor, "lanes heads group tokens"]:
        """``||v W_O||_1`` of each value through the slice of each query head that reads it, in fp32.

        CriticalKV (arXiv 2502.03805): how far the layer's output can move if the value is dropped.

        Args:
            values: by lane; lanes of a row follow one another, each with the next ``heads`` KV heads.
        """
        lanes, heads, tokens, head_dim = values.shape
        by_kv_head = values.float().reshape(-1, self.kv_heads, tokens, head_dim)
        weight = self.weight.float().unflatten(0, (self.kv_heads, -1))
        rows, group = by_kv_head.shape[0], weight.shape[1]
        norms = torch.empty(rows, self.kv_heads, group, tokens, dtype=torch.float32, device=values.device)
        step = max(1, _SCRATCH_ELEMENTS // max(1, rows * self.weight.shape[0] * self.weight.shape[2]))
        for first in range(0, tokens, step):
            part = by_kv_head[:, :, None, first : first + step] @ weight[None]
            norms[..., first : first + step] = part.abs().sum(-1)
        return norms.reshape(lanes, heads, group, tokens)
