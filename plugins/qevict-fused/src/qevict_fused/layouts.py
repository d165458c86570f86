"""Layouts of codes, as the operator is told of them."""

import functools
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import EncodedSegment, View
from qevict.contracts.paired import PairedCodes
from qevict.contracts.quantizer import Quantizer
from qevict.contracts.values import Codes

CHANNELS = 16
"""Channels of a key come in multiples of it: eight pairs fill a vector."""


Told = tuple[Sequence[Tensor], Sequence[int]]
"""Arrays of encoded segments, and the numbers that say what they are."""

_KNOWN: WeakKeyDictionary[EncodedSegment, Told] = WeakKeyDictionary()
"""The engine lends the same segments token after token, until something in them moves."""


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


def told(view: View) -> Told | None:
    """What the operator is told of all encoded segments; None if it cannot read them."""
    arrays: list[Tensor] = []
    formats: list[int] = []
    for segment in view.encoded:
        own = _KNOWN.get(segment) or _of_segment(segment, view.keys.shape[3])
        if own is None:
            return None
        arrays += own[0]
        formats += own[1]
    return arrays, formats


def _of_segment(segment: EncodedSegment, head_dim: int) -> Told | None:
    sides = reading(segment.keys, segment.values)
    if sides is None:
        return None
    keys, values = sides
    arrays = [segment.slots, *keys.arrays(segment.key_codes), *values.arrays(segment.value_codes)]
    own = arrays, [*keys.format(head_dim), *values.format(head_dim)]
    # Places are made into a tensor for each call: one that is made while a model is traced is of no use later.
    if keys.layout.places is None and values.layout.places is None:
        _KNOWN[segment] = own
    return own
