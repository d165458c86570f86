"""What a backend is asked to attend over.

A scene fixes what each lane holds: sinks, windows with a known decoded key and value by token, evicted windows that
leave gaps, and an open window that is only partly written.
"""

import random
from collections.abc import Sequence
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import Query
from qevict.contracts.quantizer import Origin, Quantizer, for_windows
from qevict.contracts.rotary import Rotary
from qevict.contracts.values import Codes
from qevict.testing.rotary import plainly_rotated
from qevict.testing.values import normal, uniform

Codecs: TypeAlias = Sequence[tuple[Quantizer, Quantizer]]
"""Quantizers of keys and of values, one pair for each encoded segment."""

ABSENT, DENSE = -1, 0
"""Homes of a window: evicted, or in the dense pools; encoded segments count from 1."""


@attrs.frozen
class BackendCase:
    """What lanes hold and who asks.

    Attributes:
        lanes: lanes of the layer.
        heads: KV heads of one lane.
        group: query heads that share a KV head.
        queries: new tokens of the longest lane.
        sinks: sinks of every lane.
        windows: whole windows of the longest lane, some of them evicted.
        dense: how many of them, in tenths, lie densely.
        dtype: dtype of the model.
        seed: decides the numbers, and where everything lies.
        softcap: what logits are capped at.
        sink_logits: whether there are sink logits.
    """

    lanes: int
    heads: int
    group: int
    queries: int
    sinks: int
    windows: int
    dense: int
    dtype: torch.dtype
    seed: int
    softcap: float | None = None
    sink_logits: bool = False


@attrs.frozen(eq=False)
class Scene:
    """A case worked out; blocks are numbered ``lane * (windows + 1) + window``.

    Attributes:
        case: the case.
        codecs: quantizers of the encoded segments.
        rotary: how keys turn.
        key_codes: codes of every block's keys, by codec.
        value_codes: codes of every block's values, by codec.
        keys: rotated keys of every block, as decoded in fp32 (pools round), ``[heads, blocks, window, head_dim]``.
        values: values of every block, likewise.
        codec: which codec each block is made with.
        kept: whether each block is there, ``[lanes][windows + 1]``.
        sink_keys: rotated keys of the sinks.
        sink_values: values of the sinks.
        lengths: true tokens of each lane.
        offsets: rotary minus true position, by lane.
        query: who asks.
    """

    case: BackendCase
    codecs: Codecs
    rotary: Rotary
    key_codes: tuple[Codes, ...]
    value_codes: tuple[Codes, ...]
    keys: Tensor
    values: Tensor
    codec: tuple[int, ...]
    kept: tuple[tuple[bool, ...], ...]
    sink_keys: Tensor
    sink_values: Tensor
    lengths: Tensor
    offsets: Tensor
    query: Query

    @property
    def window_tokens(self) -> int:
        """Tokens of one window."""
        return self.keys.shape[2]

    def block(self, lane: int, window: int) -> int:
        """The number of a block."""
        return lane * (self.case.windows + 1) + window

    def first(self, window: int) -> int:
        """The first position of a window."""
        return self.case.sinks + window * self.window_tokens


def make_scene(case: BackendCase, codecs: Codecs, window_tokens: int, head_dim: int) -> Scene:
    """Ragged lanes: up to five queries too many are pads on the left, and the last window of every lane is open."""
    chance, per_lane = random.Random(case.seed), case.windows + 1
    last = [case.windows] + [chance.randint(0, case.windows) for _ in range(case.lanes - 1)]
    lengths = [case.sinks + window_tokens * each + chance.randint(1, window_tokens) for each in last]
    new = [min(case.queries - chance.randint(0, min(case.queries - 1, 5)), length) for length in lengths]
    recent = [(length - tokens - case.sinks) // window_tokens for length, tokens in zip(lengths, new, strict=True)]
    kept = tuple(
        tuple(w <= last[lane] and (w >= recent[lane] or chance.random() < 0.7) for w in range(per_lane))
        for lane in range(case.lanes)
    )
    offsets = torch.tensor([chance.choice([0, 11]) for _ in range(case.lanes)])
    rotary = Rotary(100.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2)), amplitude=1.1)
    blocks = _make_blocks(case, codecs, window_tokens, head_dim)
    steps = torch.arange(per_lane * window_tokens).view(per_lane, window_tokens)
    positions = (case.sinks + steps[None] + offsets[:, None, None]).flatten(0, 1)
    keys = plainly_rotated(blocks.keys, positions, rotary.inverse_frequencies, rotary.amplitude)
    sinks = (case.lanes, case.heads, case.sinks, head_dim)
    places = [[-1] * (case.queries - tokens) + [*range(n - tokens, n)] for tokens, n in zip(new, lengths, strict=True)]
    vectors = 2 * normal(case.seed + 1, case.lanes, case.heads, case.group, case.queries, head_dim)
    return Scene(
        case=case,
        codecs=codecs,
        rotary=rotary,
        key_codes=blocks.key_codes,
        value_codes=blocks.value_codes,
        keys=keys,
        values=blocks.values,
        codec=blocks.codec,
        kept=kept,
        sink_keys=normal(case.seed + 2, *sinks).to(case.dtype),
        sink_values=normal(case.seed + 3, *sinks).to(case.dtype),
        lengths=torch.tensor(lengths),
        offsets=offsets,
        query=Query(
            vectors.to(case.dtype),
            torch.tensor(places),
            chance.choice([0.6, 1.4]) * head_dim**-0.5,
            padded=min(map(min, places)) < 0,
            softcap=case.softcap,
            sink_logits=2 * normal(case.seed + 7, *vectors.shape[:3]) if case.sink_logits else None,
        ),
    )


def encoded(quantizer: Quantizer, windows: Tensor) -> Codes:
    """Codes of windows, and what these share beside them, as a backend is given both."""
    shared = for_windows(quantizer.fit(windows, Origin(0, (*range(windows.shape[0]),))), windows.shape[1])
    return {**shared, **quantizer.encode(windows, shared)}


@attrs.frozen(eq=False)
class _Blocks:
    """All blocks, encoded by every codec, and decoded by the one that is theirs."""

    key_codes: tuple[Codes, ...]
    value_codes: tuple[Codes, ...]
    keys: Tensor
    values: Tensor
    codec: tuple[int, ...]


def _make_blocks(case: BackendCase, codecs: Codecs, window_tokens: int, head_dim: int) -> _Blocks:
    count = case.lanes * (case.windows + 1)
    shape = (case.heads, count, window_tokens, head_dim)
    raw_keys, raw_values = 2 * normal(case.seed + 4, *shape), normal(case.seed + 5, *shape)
    key_codes = tuple(encoded(keys, raw_keys) for keys, _ in codecs)
    value_codes = tuple(encoded(values, raw_values) for _, values in codecs)
    codec = (uniform(case.seed + 6, count) * len(codecs)).long()
    decoded_keys = [keys.decode(codes, head_dim) for (keys, _), codes in zip(codecs, key_codes, strict=True)]
    decoded_values = [values.decode(codes, head_dim) for (_, values), codes in zip(codecs, value_codes, strict=True)]
    everywhere = torch.arange(count)
    return _Blocks(
        key_codes,
        value_codes,
        torch.stack(decoded_keys)[codec, :, everywhere].transpose(0, 1),
        torch.stack(decoded_values)[codec, :, everywhere].transpose(0, 1),
        tuple(codec.tolist()),
    )
