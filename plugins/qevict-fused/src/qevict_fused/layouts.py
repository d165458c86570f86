"""Layouts of codes, as the operator is told of them."""

import functools
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import View
from qevict.contracts.paired import PairedCodes
from qevict.contracts.quantizer import Quantizer
from qevict.contracts.values import Codes

CHANNELS = 16
"""Channels of a key come in multiples of it: eight pairs fill a vector."""


@attrs.frozen(eq=False)
class Side:
    """Keys, or values, of an encoded segment.

    Attributes:
        names: of the arrays, in the order in which the operator reads them.
        layout: how they are packed.
    """

    names: tuple[str, ...]
    layout: PairedCodes

    @classmethod
    def of(cls, layout: PairedCodes) -> "Side":
        """What a layout says."""
        names = ["codes", "scale", "zero"]
        names += ["scale_range", "zero_range"] if layout.scale_bits else []
        names += [name for name in ("norm", "channel_scale", "mean") if name in layout.undone]
        return cls(tuple(names), layout)

    def arrays(self, codes: Codes) -> list[Tensor]:
        """The arrays themselves."""
        own, places = [codes[name] for name in self.names], self.layout.places
        return own if places is None else [*own, torch.tensor(places, dtype=torch.float32, device="cpu")]

    def format(self, head_dim: int) -> tuple[int, ...]:
        """What the arrays are, in the order of ``Format`` in ``operator.cpp``."""
        layout = self.layout
        return (
            layout.bits,
            layout.scale_bits or 0,
            layout.group_channels or head_dim,
            *(name in layout.undone for name in ("hadamard", "norm", "channel_scale", "mean")),
            layout.places is not None,
        )


@functools.lru_cache(maxsize=256)
def reading(keys: Quantizer, values: Quantizer) -> tuple[Side, Side] | None:
    """How the operator reads a segment: grids per channel for keys, per token for values; None if it cannot."""
    of_keys, of_values = keys.paired, values.paired
    if of_keys is None or of_values is None or (of_keys.per, of_values.per) != ("channel", "token"):
        return None
    if "channel_scale" in of_keys.undone or "norm" in of_values.undone:
        return None
    return Side.of(of_keys), Side.of(of_values)


def told(view: View) -> tuple[Sequence[Tensor], Sequence[int]]:
    """Arrays of all encoded segments, and the numbers that say what they are."""
    arrays: list[Tensor] = []
    formats: list[int] = []
    for segment in view.encoded:
        sides = reading(segment.keys, segment.values)
        assert sides is not None
        arrays.append(segment.slots)
        for side, codes in zip(sides, (segment.key_codes, segment.value_codes), strict=True):
            arrays += side.arrays(codes)
            formats += side.format(view.keys.shape[3])
    return arrays, formats
