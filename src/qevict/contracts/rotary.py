"""Rotary position embedding as a value that can be undone."""

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor

from qevict.errors import UnsupportedModelError


def _same_tensor(left: Tensor, right: Tensor) -> bool:
    return bool(torch.equal(left, right))


@attrs.frozen
class Rotary:
    """RoPE in the half-split pairing, built by the Hugging Face floor from the model's own module.

    Channel ``i`` and ``i + pairs`` of a key turn together by ``position * inverse_frequencies[i]`` and are scaled by
    ``amplitude`` (1 for plain, linear and llama3 tables; larger for yarn). Channels from ``rotary_dim`` on stay as they
    are (partial RoPE).

    Laws:
        * ``rotate`` equals the model's own function on the same tables (fp32: bit for bit).
        * ``unrotate(rotate(x, p), p)`` equals ``x`` within 1e-6 relative in fp32. The inverse divides by
          ``cos^2 + sin^2``; a plain ``-sin`` would be wrong wherever the amplitude is not 1.
        * Work is done in fp32 whatever the dtype of ``x``; the result is fp32 and the caller rounds once.

    Source: RoFormer (arXiv 2104.09864), eq. 34; amplitude as in YaRN (arXiv 2309.00071), section 3.4.
    """

    inverse_frequencies: Tensor = attrs.field(eq=attrs.cmp_using(eq=_same_tensor), hash=False)
    amplitude: float = 1.0

    def __attrs_post_init__(self) -> None:
        if self.inverse_frequencies.ndim != 1 or not self.amplitude > 0:
            msg = f"a rotary table is one frequency per channel pair and a positive amplitude, got {self!r}"
            raise UnsupportedModelError(msg)

    def __deepcopy__(self, _memo: object) -> "Rotary":
        return self

    @property
    def rotary_dim(self) -> int:
        """Channels that turn, the first of each key."""
        return 2 * self.inverse_frequencies.shape[0]

    def rotate(
        self, x: Float[Tensor, "*lead tokens head_dim"], positions: Int[Tensor, "*some tokens"]
    ) -> Float[Tensor, "*lead tokens head_dim"]:
        """Turn pre-RoPE keys to ``positions`` (which broadcast against the leading axes of ``x``)."""
        cos, sin = self._tables(positions)
        return _turn(x.float().contiguous(), cos, sin)

    def unrotate(
        self, x: Float[Tensor, "*lead tokens head_dim"], positions: Int[Tensor, "*some tokens"]
    ) -> Float[Tensor, "*lead tokens head_dim"]:
        """The exact inverse of :meth:`rotate`."""
        cos, sin = self._tables(positions)
        norm = cos.square() + sin.square()
        return _turn(x.float().contiguous(), cos / norm, -sin / norm)

    def angles(
        self, positions: Int[Tensor, "*some tokens"]
    ) -> tuple[Float[Tensor, "*some tokens pairs"], Float[Tensor, "*some tokens pairs"]]:
        """Cosine and sine of how far each channel pair turns at ``positions``, in fp32, without the amplitude."""
        angles = positions[..., None].float() * self.inverse_frequencies.float()
        return angles.cos(), angles.sin()

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.angles(positions)
        return cos * self.amplitude, sin * self.amplitude


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Multiply channel pairs, half against half, by ``cos + i sin``; further channels are copied."""
    pairs = cos.shape[-1]
    rest = x.shape[-1] - 2 * pairs
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second, still = x.split((pairs, pairs, rest), dim=-1)
    low, high, kept = turned.split((pairs, pairs, rest), dim=-1)
    torch.mul(first, cos, out=low).sub_(second * sin)
    torch.mul(second, cos, out=high).add_(first * sin)
    kept.copy_(still)
    return turned
