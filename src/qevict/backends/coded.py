"""Windows that live as paired codes, attended to without rebuilding keys or values."""

import attrs
import torch
from torch import Tensor

from qevict.backends.logits import capped
from qevict.contracts.backend import EncodedSegment
from qevict.contracts.quantizer import Quantizer
from qevict.contracts.rotary import Rotary


def readable(keys: Quantizer, values: Quantizer, window_tokens: int) -> bool:
    """Keys with a grid per channel, values with a grid per token, nothing else, and codes that fill machine words."""
    if keys.paired is None or values.paired is None or (keys.paired.per, values.paired.per) != ("channel", "token"):
        return False
    if not (keys.paired.plain and values.paired.plain):
        return False
    return keys.paired.reads_words(window_tokens) and values.paired.reads_words(window_tokens)


@attrs.frozen(eq=False)
class CodedShelf:
    """An encoded segment in the order of its slots, for lanes of equally many slots.

    Keys: ``R(p + j) k = R(p) (zero + scale code)`` turned on by the place ``j`` in the window. The inverse of ``R(j)``
    goes to the query, once for each ``j``; ``R(p)`` and the grid become three numbers by channel and window, so that a
    key is two products of codes. Values: the scale of a token goes to its weight, its zero point adds up apart.

    Attributes:
        segment: what lives as codes.
        lanes: lanes of the layer.
        window_tokens: tokens of a window.
        rotary: how keys turn.
        positions: rotary position of the first token of each slot.
    """

    segment: EncodedSegment
    lanes: int
    window_tokens: int
    rotary: Rotary
    positions: Tensor

    @property
    def slots(self) -> Tensor:
        """Slot of each column of the view."""
        return self.segment.slots

    @property
    def tokens(self) -> int:
        """Tokens of one lane."""
        return self.segment.regions[0] * self.window_tokens

    def logits(self, asking: Tensor, softcap: float | None) -> Tensor:
        """``[strips, group, tokens]`` capped dot products; tokens run over the window's places, then over the slots."""
        strips, group, _ = asking.shape
        own = self.segment.regions[0]
        queries = self._turned_back(asking)
        logits = None
        for keys, query in zip(self._keys(strips), queries, strict=True):
            columns = keys.flatten(0, 1).transpose(1, 2)
            rows = query.flatten(0, 1)
            logits = torch.bmm(rows, columns) if logits is None else logits.baddbmm_(rows, columns)
        assert logits is not None
        by_place = capped(logits, softcap).view(-1, self.lanes, self.window_tokens, group, own)
        by_place.masked_fill_(self.segment.hidden.view(self.lanes, 1, 1, own), -torch.inf)
        return by_place.view(strips, -1, group, own).transpose(1, 2).flatten(2)

    def _turned_back(self, asking: Tensor) -> tuple[Tensor, Tensor]:
        """Both halves of ``[strips, window, group, head_dim / 2]``: the query turned back by each place."""
        steps = torch.arange(self.window_tokens, device=asking.device)
        cos, sin = self.rotary.angles(steps)
        cos, sin = cos[:, None], sin[:, None]
        low, high = asking[:, None].chunk(2, dim=-1)
        return low * cos + high * sin, high * cos - low * sin

    def _keys(self, strips: int) -> tuple[Tensor, Tensor]:
        """Both halves of ``[strips, window, slots, head_dim / 2]``: keys turned to the first place of their window."""
        paired, codes = self.segment.keys.paired, self.segment.key_codes
        assert paired is not None
        levels = paired.levels(codes["codes"], self.window_tokens, strips)
        low, high = levels[:, 0], levels[:, 1]
        cos, sin = (table * self.rotary.amplitude for table in self.rotary.angles(self.positions))
        cos, sin = (table.view(1, self.lanes, -1, table.shape[1]) for table in (cos, sin))
        scale_low, scale_high = self._halves(codes["scale"])
        zero_low, zero_high = self._halves(codes["zero"])

        def whole(numbers: Tensor) -> Tensor:
            return numbers.view(strips, 1, *numbers.shape[2:])

        turned_low = torch.addcmul(whole(zero_low * cos - zero_high * sin), low, whole(scale_low * cos))
        turned_low.addcmul_(high, whole(scale_high * sin), value=-1)
        turned_high = torch.addcmul(whole(zero_low * sin + zero_high * cos), low, whole(scale_low * sin))
        turned_high.addcmul_(high, whole(scale_high * cos))
        return turned_low, turned_high

    def _halves(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """``[heads, slots, head_dim]`` as two of ``[heads, lanes, slots of a lane, head_dim / 2]`` in fp32."""
        low, high = numbers.float().unflatten(1, (self.lanes, -1)).chunk(2, dim=-1)
        return low, high

    def output(self, share: Tensor) -> Tensor:
        """``[strips, group, head_dim]`` values weighed by ``[strips, group, tokens]``."""
        strips = share.shape[0]
        paired, codes = self.segment.values.paired, self.segment.value_codes
        assert paired is not None
        levels = paired.levels(codes["codes"], self.window_tokens, strips)
        scale, zero = (
            codes[name].float().view(strips, -1, self.window_tokens).transpose(1, 2).reshape(strips, 1, -1)
            for name in ("scale", "zero")
        )
        weights = share * scale
        halves = [torch.bmm(weights, levels[:, half].flatten(1, 2)) for half in (0, 1)]
        return torch.cat(halves, dim=2).add_((share * zero).sum(2, keepdim=True))

    def by_slot(self, share: Tensor) -> Tensor:
        """``[strips, group, slots]`` weights summed over the tokens of a window."""
        by_slot: Tensor = share.unflatten(2, (self.window_tokens, -1)).sum(2)
        return by_slot
