"""How scales and zero points are stored: as numbers, for each window or once, or on a grid of their own."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce
from itertools import product, starmap

import attrs
import torch
from torch import Tensor

from qevict.contracts.quantizer import NOTHING_SHARED
from qevict.contracts.values import ArraySpec, Codes, Layout
from qevict.errors import PolicyError
from qevict.quantizers.packing import CODES_PER_GROUP, pack, packed_bytes, unpack
from qevict.quantizers.rounding import round_down, round_up

Loss = Callable[[Tensor, Tensor], Tensor]
"""Squared error of each group, given zero points and scales: all of them ``[..., groups]``."""

_Grids = tuple[Tensor, Tensor, Tensor]
"""A loss, and codes of zero points and scales, of each group."""


class Scales(ABC):
    """Stores a grid for each group, from its smallest number to its largest."""

    @property
    def code_bits(self) -> int | None:
        """Bits of each, where they are codes themselves; None where they are numbers."""
        return None

    @property
    def by_window(self) -> bool:
        """The grid of a group covers the numbers of its own window, and no others."""
        return True

    @abstractmethod
    def layout(self, groups: int) -> Layout:
        """The arrays that each window stores for that many groups.

        Raises:
            PolicyError: they do not fill whole bytes.
        """

    def shared_layout(self, groups: int) -> Layout:
        """The arrays that all windows of a KV head have in common."""
        return {}

    def fit(self, low: Tensor, high: Tensor, steps: int, loss: Loss) -> Codes:
        """The shared arrays, for grids of that many steps from ``low`` to ``high``: ``[heads, groups]`` in fp32."""
        return NOTHING_SHARED

    @abstractmethod
    def cover(self, low: Tensor, high: Tensor, steps: int, loss: Loss) -> Codes:
        """The arrays of each window, likewise: ``[..., groups]``."""

    @abstractmethod
    def read(self, codes: Codes) -> tuple[Tensor, Tensor]:
        """Zero points and scales in fp32, ``[..., groups]``, from both kinds of arrays."""


@attrs.frozen
class Plain(Scales):
    """Both as numbers of one dtype: the zero point is rounded down, then the scale up, so that a grid covers all."""

    dtype: torch.dtype

    def layout(self, groups: int) -> Layout:
        return {"scale": ArraySpec((groups,), self.dtype), "zero": ArraySpec((groups,), self.dtype)}

    def cover(self, low: Tensor, high: Tensor, steps: int, loss: Loss) -> Codes:
        zero = round_down(low, self.dtype)
        return {"scale": round_up((high - zero.float()) / steps, self.dtype), "zero": zero}

    def read(self, codes: Codes) -> tuple[Tensor, Tensor]:
        return codes["zero"].float(), codes["scale"].float()


@attrs.frozen
class PerSequence(Scales):
    """The windows of a KV head have their grids in common.

    Attributes:
        own: how these are stored.
    """

    own: Scales

    @property
    def code_bits(self) -> int | None:
        return self.own.code_bits

    @property
    def by_window(self) -> bool:
        return False

    def layout(self, groups: int) -> Layout:
        return {}

    def shared_layout(self, groups: int) -> Layout:
        return self.own.layout(groups)

    def fit(self, low: Tensor, high: Tensor, steps: int, loss: Loss) -> Codes:
        return self.own.cover(low, high, steps, loss)

    def cover(self, low: Tensor, high: Tensor, steps: int, loss: Loss) -> Codes:
        return {}

    def read(self, codes: Codes) -> tuple[Tensor, Tensor]:
        return self.own.read(codes)


@attrs.frozen
class SecondLevel(Scales):
    """Both as codes of a few bits: one grid over all zero points of a window, and one over all its scales.

    The two grids are stored by their least number and their step: ``zero_range`` and ``scale_range``. A group's zero
    point is one of the two that lie next to its smallest number, its scale one of the two next to what reaches its
    largest; of the four grids it takes the one of least squared error. One of them covers the group, so that it never
    loses more than by rounding outwards; a number that lies beyond its grid is given the nearest end.

    Attributes:
        bits: of a scale, and of a zero point.
        dtype: of the ranges.
    """

    bits: int
    dtype: torch.dtype

    @property
    def code_bits(self) -> int:
        return self.bits

    def layout(self, groups: int) -> Layout:
        if groups % CODES_PER_GROUP[self.bits]:
            msg = (
                f"{groups} scales of {self.bits} bits do not fill whole bytes; they must be a multiple of "
                f"{CODES_PER_GROUP[self.bits]}: change window_tokens, or use scale_bits=8"
            )
            raise PolicyError(msg)
        codes, ends = ArraySpec((packed_bytes(groups, self.bits),), torch.uint8), ArraySpec((2,), self.dtype)
        return {"scale": codes, "scale_range": ends, "zero": codes, "zero_range": ends}

    def cover(self, low: Tensor, high: Tensor, steps: int, loss: Loss) -> Codes:
        zero_range = self._range(low)
        below = self._clamped(_places(low, zero_range).floor())
        scale_range = self._range((high - _on(zero_range, below)) / steps)

        def grids(up: int, down: int) -> _Grids:
            zeros = self._clamped(below + up)
            zero = _on(zero_range, zeros)
            scales = self._clamped(_places((high - zero) / steps, scale_range).ceil() - down)
            return loss(zero, _on(scale_range, scales)), zeros, scales

        _, zeros, scales = reduce(_better, starmap(grids, product((0, 1), (0, 1))))
        return {
            "scale": pack(scales.to(torch.uint8), self.bits),
            "scale_range": scale_range,
            "zero": pack(zeros.to(torch.uint8), self.bits),
            "zero_range": zero_range,
        }

    def read(self, codes: Codes) -> tuple[Tensor, Tensor]:
        zeros, scales = unpack(codes["zero"], self.bits), unpack(codes["scale"], self.bits)
        return _on(codes["zero_range"], zeros), _on(codes["scale_range"], scales)

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 1

    def _clamped(self, codes: Tensor) -> Tensor:
        return codes.clamp(0, self._top)

    def _range(self, x: Tensor) -> Tensor:
        """Least number and step of a grid that covers ``[..., groups]``."""
        least = round_down(x.amin(-1), self.dtype)
        return torch.stack((least, round_up((x.amax(-1) - least.float()) / self._top, self.dtype)), dim=-1)


def _better(best: _Grids, found: _Grids) -> _Grids:
    """What loses less, group by group."""
    less = found[0] < best[0]
    loss, zeros, scales = (torch.where(less, new, old) for new, old in zip(found, best, strict=True))
    return loss, zeros, scales


def _places(x: Tensor, ends: Tensor) -> Tensor:
    least, step = ends.float().unsqueeze(-2).unbind(-1)
    return (x - least) / torch.where(step > 0, step, 1)


def _on(ends: Tensor, codes: Tensor) -> Tensor:
    """The numbers that codes stand for."""
    least, step = ends.float().unsqueeze(-2).unbind(-1)
    return torch.addcmul(least, codes.float(), step)
