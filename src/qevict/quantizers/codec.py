"""From windows to codes and back: transforms, then a grid for each group, then codes without a gap."""

from functools import cached_property, partial

import attrs
import torch
from torch import Tensor

from qevict.contracts.paired import PairedCodes, by_channels, by_pairs
from qevict.contracts.quantizer import NOTHING_SHARED, for_windows
from qevict.contracts.values import ArraySpec, Codes, Layout
from qevict.errors import PolicyError
from qevict.quantizers.groups import Groups
from qevict.quantizers.levels import Levels, nearest, places_of, steps_of
from qevict.quantizers.packing import CODES_PER_GROUP, pack, packed_bytes, unpack
from qevict.quantizers.scales import Scales
from qevict.quantizers.transforms import Transform


@attrs.frozen
class Codec:
    """What the quantizers of this package are made of.

    Attributes:
        paired: how codes are packed.
        groups: which numbers share a scale and a zero point.
        scales: how these are stored.
        levels: where the levels lie between the ends of a grid.
        transforms: in the order in which they are done.
    """

    paired: PairedCodes
    groups: Groups
    scales: Scales
    levels: Levels
    transforms: tuple[Transform, ...]

    @cached_property
    def readable(self) -> PairedCodes:
        """How the arrays are to be read."""
        return attrs.evolve(
            self.paired,
            group_channels=self.groups.channels,
            scale_bits=self.scales.code_bits,
            places=None if self.levels == "uniform" else steps_of(self.levels, self.paired.bits),
            undone=tuple(transform.undone for transform in reversed(self.transforms)),
        )

    @property
    def keeps_constants(self) -> bool:
        """A window has the grids of its own numbers."""
        return self.scales.by_window and not self.transforms

    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        """The arrays of one window."""
        layout = {"codes": ArraySpec((self._packed_bytes(window_tokens, head_dim),), torch.uint8)}
        for transform in self.transforms:
            layout |= transform.layout(window_tokens)
        return layout | dict(self.scales.layout(self.groups.count(window_tokens, head_dim)))

    def _packed_bytes(self, window_tokens: int, head_dim: int) -> int:
        codes, bits = window_tokens * head_dim, self.paired.bits
        if head_dim % 2:
            msg = f"codes are packed by pairs of channels, so head_dim must be even, got {head_dim}"
            raise PolicyError(msg)
        if codes % CODES_PER_GROUP[bits]:
            msg = (
                f"{codes} codes of {bits} bits (window {window_tokens} x head_dim {head_dim}) do not fill whole bytes; "
                f"window x head_dim must be a multiple of {CODES_PER_GROUP[bits]}: change window_tokens or bits"
            )
            raise PolicyError(msg)
        return packed_bytes(codes, bits)

    def shared_layout(self, head_dim: int) -> Layout:
        """The arrays of a sequence."""
        layout = dict(self.scales.shared_layout(self.groups.count(1, head_dim)))
        for transform in self.transforms:
            layout |= transform.shared_layout(head_dim)
        return layout

    def fit(self, x: Tensor) -> Codes:
        """What the windows of ``[heads, windows, window, head_dim]`` have in common: arrays for each head."""
        if not self.shared_layout(x.shape[-1]):
            return NOTHING_SHARED
        y, shared = x.float(), dict[str, Tensor]()
        for transform in self.transforms:
            own = transform.fit(y)
            y, _ = transform.forward(y, for_windows(own, x.shape[1]))
            shared |= own
        y = y.transpose(-1, -2)
        low, high = self.groups.ends(y)

        def loss(zero: Tensor, scale: Tensor) -> Tensor:
            return self._loss(y, zero.unsqueeze(1), scale.unsqueeze(1)).sum(1)

        return shared | dict(self.scales.fit(low.amin(1), high.amax(1), self._steps, loss))

    def encode(self, x: Tensor, shared: Codes) -> Codes:
        """The arrays of each window."""
        y, stored = x.float(), dict[str, Tensor]()
        for transform in self.transforms:
            y, own = transform.forward(y, shared)
            stored |= own
        y = y.transpose(-1, -2)
        low, high = self.groups.ends(y)
        stored |= self.scales.cover(low, high, self._steps, partial(self._loss, y))
        codes = self._nearest(y, *self.scales.read({**shared, **stored}))
        packed = pack(by_pairs(codes).flatten(-2), self.paired.bits)
        return {"codes": packed, **stored}

    def _nearest(self, y: Tensor, zero: Tensor, scale: Tensor) -> Tensor:
        """Codes of ``[..., head_dim, window]`` on grids of ``[..., groups]``."""
        zero, scale = (self.groups.spread(each, y.shape[-2]) for each in (zero, scale))
        return nearest((y - zero) / torch.where(scale > 0, scale, 1), self.levels, self.paired.bits)

    def _loss(self, y: Tensor, zero: Tensor, scale: Tensor) -> Tensor:
        """Squared error of each group."""
        places = places_of(self._nearest(y, zero, scale), self.levels, self.paired.bits)
        zero, scale = (self.groups.spread(each, y.shape[-2]) for each in (zero, scale))
        return self.groups.sums(torch.addcmul(zero, places, scale).sub_(y).square_())

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        """The windows in fp32."""
        zero, scale = (self.groups.spread(each, head_dim).transpose(-1, -2) for each in self.scales.read(codes))
        places = places_of(self._codes(codes["codes"], head_dim), self.levels, self.paired.bits)
        y = torch.addcmul(zero, places, scale)
        for transform in reversed(self.transforms):
            y = transform.inverse(y, codes)
        return y

    def _codes(self, packed: Tensor, head_dim: int) -> Tensor:
        """``[heads, windows, window, head_dim]`` whole numbers."""
        bits = self.paired.bits
        window = 8 * packed.shape[-1] // (bits * head_dim)
        if not self.paired.reads_words(window):
            return by_channels(unpack(packed, bits).unflatten(-1, (head_dim, -1))).transpose(-1, -2)
        levels = self.paired.levels(packed.contiguous(), window, packed.shape[0])
        return levels.permute(0, 3, 2, 1, 4).flatten(3)

    @property
    def _steps(self) -> int:
        return (1 << self.paired.bits) - 1
