"""What a backend is asked to attend over, laid out in one way or another.

A scene fixes what each lane holds: sinks, windows with a known decoded key and value by token, evicted windows that
leave gaps, and an open window that is only partly written. A view says which windows lie densely and which as codes,
in which slots and columns; the answer depends on it as far as dense pools round.
"""

import random
from collections.abc import Sequence
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import EncodedSegment, Query, View
from qevict.contracts.quantizer import Quantizer
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
        ),
    )


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
    key_codes = tuple(keys.encode(raw_keys) for keys, _ in codecs)
    value_codes = tuple(values.encode(raw_values) for _, values in codecs)
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


@attrs.frozen(eq=False)
class Placed:
    """A view of a scene.

    Attributes:
        view: what the backend gets.
        blocks: which window each column of a lane is; None for filler.
    """

    view: View
    blocks: tuple[tuple[int | None, ...], ...]

    def densely(self, lane: int) -> tuple[int | None, ...]:
        """Windows of a lane in the dense pools, which round them to the model's dtype."""
        return self.blocks[lane][: self.view.slots.shape[1]]


def lay_out(scene: Scene, seed: int, *, filler: float = 1.0) -> Placed:
    """Split the windows over a dense and the encoded segments, in any slots and columns; the open window is dense.

    Args:
        scene: what is laid out.
        seed: decides how; the same for the same seed.
        filler: magnitude of what lies in free slots and unwritten tokens.
    """
    chance, case = random.Random(seed), scene.case
    homes = [_homes(scene, lane, chance) for lane in range(case.lanes)]
    shelves = [_shelve(scene, homes, home, chance) for home in range(len(scene.codecs) + 1)]
    keys, values = _dense_pools(scene, shelves[0], filler)
    encoded = tuple(_encoded(scene, codec, shelf, filler) for codec, shelf in enumerate(shelves[1:]))
    present = torch.cat([shelf.present for shelf in shelves], dim=1)
    view = View(
        sink_keys=scene.sink_keys,
        sink_values=scene.sink_values,
        keys=keys,
        values=values,
        slots=shelves[0].slots,
        regions=shelves[0].regions,
        hidden=_unwritten(scene, shelves[0]),
        encoded=encoded,
        windows=torch.cat([shelf.windows_of for shelf in shelves], dim=1),
        present=None if present.all() else present,
        lengths=scene.lengths,
        rotary=scene.rotary,
        rotary_offset=scene.offsets,
    )
    return Placed(view, tuple(sum((shelf.windows[lane] for shelf in shelves), ()) for lane in range(case.lanes)))


def _homes(scene: Scene, lane: int, chance: random.Random) -> list[int]:
    """Where each window of a lane lives; only whole windows are encoded."""
    homes = []
    for window, kept in enumerate(scene.kept[lane]):
        written = int(scene.lengths[lane]) >= scene.first(window + 1)
        coded = written and chance.randrange(10) >= scene.case.dense
        homes.append((1 + scene.codec[scene.block(lane, window)] if coded else DENSE) if kept else ABSENT)
    return homes


@attrs.frozen(eq=False)
class _Shelf:
    """One segment: which block is in which slot, what belongs to each lane, and what its columns are."""

    pool: dict[int, int]
    regions: tuple[int, ...]
    windows: list[tuple[int | None, ...]]
    slots: Tensor
    windows_of: Tensor
    present: Tensor

    @property
    def capacity(self) -> int:
        """Slots of the pool."""
        return sum(self.regions)


def _shelve(scene: Scene, homes: list[list[int]], home: int, chance: random.Random) -> _Shelf:
    """Windows in ascending columns and shuffled slots of their lane's region, some of which stay free.

    Filler points at any slot and claims to be any window.
    """
    lanes = [[window for window, place in enumerate(lane) if place == home] for lane in homes]
    width, alike = max(map(len, lanes)) + chance.randint(0, 2), chance.random() < 0.5
    regions = [width if alike else len(own) + chance.choice([0, 0, 1, 3]) for own in lanes]
    regions[-1] += sum(regions) == 0  # a pool has a slot
    pool: dict[int, int] = {}
    slots, claims, windows, first = [], [], [], 0
    for lane, (blocks, region) in enumerate(zip(lanes, regions, strict=True)):
        gap, own = width - len(blocks), chance.sample(range(first, first + region), len(blocks))
        pool |= {slot: scene.block(lane, window) for slot, window in zip(own, blocks, strict=True)}
        slots.append(own + [chance.randrange(sum(regions)) for _ in range(gap)])
        claims.append(blocks + [chance.choice([0, 5, 900]) for _ in range(gap)])
        windows.append((*blocks, *[None] * gap))
        first += region
    present = [[window is not None for window in lane] for lane in windows]
    shape = (len(lanes), width)
    return _Shelf(
        pool,
        tuple(regions),
        windows,
        torch.tensor(slots, dtype=torch.int64).view(shape),
        torch.tensor(claims, dtype=torch.int64).view(shape),
        torch.tensor(present, dtype=torch.bool).view(shape),
    )


def _unwritten(scene: Scene, shelf: _Shelf) -> Tensor:
    """Tokens of the dense pools that nothing was written to."""
    hidden = torch.ones(shelf.capacity, scene.window_tokens, dtype=torch.bool)
    for slot, block in shelf.pool.items():
        hidden[slot, : _written(scene, block)] = False
    return hidden


def _written(scene: Scene, block: int) -> int:
    """Tokens of a block that are there."""
    lane, window = divmod(block, scene.case.windows + 1)
    return min(scene.window_tokens, int(scene.lengths[lane]) - scene.first(window))


def _dense_pools(scene: Scene, shelf: _Shelf, filler: float) -> tuple[Tensor, Tensor]:
    """Pools of keys and values; free slots and unwritten tokens hold something else."""
    heads, _, window, head_dim = scene.keys.shape
    shape = (heads, shelf.capacity, window, head_dim)
    keys, values = (filler * normal(scene.case.seed + 10 + each, *shape).to(scene.case.dtype) for each in (0, 1))
    for slot, block in shelf.pool.items():
        written = _written(scene, block)
        keys[:, slot, :written] = scene.keys[:, block, :written]
        values[:, slot, :written] = scene.values[:, block, :written]
    return keys, values


def _encoded(scene: Scene, codec: int, shelf: _Shelf, filler: float) -> EncodedSegment:
    keys, values = scene.codecs[codec]
    return EncodedSegment(
        keys,
        values,
        key_codes=_lent(scene, keys, scene.key_codes[codec], shelf, filler),
        value_codes=_lent(scene, values, scene.value_codes[codec], shelf, filler),
        slots=shelf.slots,
        regions=shelf.regions,
        hidden=torch.tensor([slot not in shelf.pool for slot in range(shelf.capacity)]),
    )


def _lent(scene: Scene, quantizer: Quantizer, codes: Codes, shelf: _Shelf, filler: float) -> Codes:
    """The arrays of an encoded pool; free slots hold codes of something else."""
    heads, _, window, head_dim = scene.keys.shape
    junk = min(filler, 1e4) * normal(scene.case.seed + 12, heads, shelf.capacity, window, head_dim)
    arrays = {name: array.clone() for name, array in quantizer.encode(junk).items()}
    slots, blocks = torch.tensor([*shelf.pool]).long(), torch.tensor([*shelf.pool.values()]).long()
    for name, array in arrays.items():
        array[:, slots] = codes[name][:, blocks]
    return arrays
