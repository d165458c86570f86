"""Scenes laid out as views: which windows lie densely and which as codes, in which slots and columns.

The answer depends on it as far as dense pools round.
"""

import random

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import EncodedSegment, View
from qevict.contracts.quantizer import Quantizer
from qevict.contracts.values import Codes
from qevict.testing.scenes import ABSENT, DENSE, Scene, encoded
from qevict.testing.values import normal


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
    encoded = tuple(_segment(scene, codec, shelf, filler) for codec, shelf in enumerate(shelves[1:]))
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


def _segment(scene: Scene, codec: int, shelf: _Shelf, filler: float) -> EncodedSegment:
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
    arrays = {name: array.clone() for name, array in encoded(quantizer, junk).items()}
    slots, blocks = torch.tensor([*shelf.pool]).long(), torch.tensor([*shelf.pool.values()]).long()
    for name, array in arrays.items():
        array[:, slots] = codes[name][:, blocks]
    return arrays
