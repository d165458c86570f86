"""The reference backend against softmax attention written as a loop over decoded keys and values.

A scene fixes what each lane holds: sinks, whole windows with a known decoded key and value by token, and an
open window that is only partly written. A layout says which windows lie densely and which as codes, and in
which columns; the answer may not depend on it.
"""

import itertools
import math
import random
from typing import NamedTuple

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qevict.backends.reference import ReferenceAttention
from qevict.contracts.backend import Attended, EncodedSegment, Query, View
from qevict.contracts.rotary import Rotary
from qevict.contracts.values import Codes, Need
from qevict.quantizers.affine import PerChannel, PerToken

WINDOW, SINKS, HEAD_DIM = 4, 3, 8
CODECS = ((PerChannel(2), PerToken(2)), (PerChannel(8, torch.float32), PerToken(4)))
ROTARY = Rotary(1 / 100.0 ** (torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)), amplitude=1.1)
BACKEND = ReferenceAttention()


class Block(NamedTuple):
    """A window of one lane: its codes, what they decode to, and where it stands."""

    number: int
    codec: int
    keys: Codes
    values: Codes
    rotated: Tensor
    decoded: Tensor

    @property
    def position(self) -> int:
        return SINKS + WINDOW * self.number


class Scene(NamedTuple):
    """What the lanes hold and who asks."""

    blocks: list[list[Block]]
    sink_keys: Tensor
    sink_values: Tensor
    lengths: Tensor
    offsets: Tensor
    query: Query


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def make_scene(seed: int, lanes: int = 3, heads: int = 2, group: int = 2, queries: int = 5, windows: int = 6) -> Scene:
    """Ragged lanes: evicted windows leave gaps, the last one is open, queries are padded on the left."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    offsets = torch.tensor([chance.choice([0, 0, 11]) for _ in range(lanes)])
    blocks, lengths = [], []
    for lane in range(lanes):
        last = chance.randint(1, windows)
        stay = sorted(chance.sample(range(last), chance.randint(0, last)))
        blocks.append([make_block(generator, index, chance.randrange(2), heads, int(offsets[lane])) for index in stay])
        blocks[lane].append(make_block(generator, last, 0, heads, int(offsets[lane])))
        lengths.append(SINKS + WINDOW * last + chance.randint(1, WINDOW))
    pads = [chance.randint(0, queries - 1) for _ in range(lanes)]
    positions = torch.tensor(
        [[-1] * pad + list(range(length - queries + pad, length)) for pad, length in zip(pads, lengths, strict=True)]
    )
    vectors = 2 * normal(generator, lanes, heads, group, queries, HEAD_DIM)
    return Scene(
        blocks,
        normal(generator, lanes, heads, SINKS, HEAD_DIM),
        normal(generator, lanes, heads, SINKS, HEAD_DIM),
        torch.tensor(lengths),
        offsets,
        Query(vectors, positions.clamp(min=-1), HEAD_DIM**-0.5),
    )


def make_block(generator: torch.Generator, index: int, codec: int, heads: int, offset: int) -> Block:
    keys, values = CODECS[codec]
    key_codes = keys.encode(2 * normal(generator, heads, 1, WINDOW, HEAD_DIM))
    value_codes = values.encode(normal(generator, heads, 1, WINDOW, HEAD_DIM))
    positions = SINKS + WINDOW * index + offset + torch.arange(WINDOW)
    rotated = ROTARY.rotate(keys.decode(key_codes, HEAD_DIM), positions)[:, 0]
    return Block(index, codec, key_codes, value_codes, rotated, values.decode(value_codes, HEAD_DIM)[:, 0])


class Placed(NamedTuple):
    """A view, and which column each block of a lane got."""

    view: View
    columns: list[dict[int, int]]


class Shelf(NamedTuple):
    """One segment: the block in each slot, each lane's region, the slots and windows of its columns."""

    pool: dict[int, Block]
    regions: list[int]
    slots: list[list[int]]
    windows: list[list[int]]
    columns: list[dict[int, int]]


def shelve(lanes: list[list[Block]], chance: random.Random) -> Shelf:
    """Put blocks into shuffled slots of their lane's region; absent columns point and claim anything."""
    width = max(map(len, lanes)) + chance.randint(0, 2)
    shelf = Shelf({}, [len(blocks) + chance.choice([0, 1, 3]) for blocks in lanes], [], [], [])
    shelf.regions[0] += sum(shelf.regions) == 0
    first = 0
    for blocks, region in zip(lanes, shelf.regions, strict=True):
        gap = width - len(blocks)
        slots = chance.sample(range(first, first + region), len(blocks))
        shelf.pool.update(zip(slots, blocks, strict=True))
        shelf.slots.append(slots + [chance.randrange(sum(shelf.regions)) for _ in range(gap)])
        shelf.windows.append([block.number for block in blocks] + [chance.choice([0, 5, 900]) for _ in range(gap)])
        shelf.columns.append({block.number: column for column, block in enumerate(blocks)})
        first += region
    return shelf


def lay_out(scene: Scene, seed: int, *, dense_share: float = 0.5, filler: float = 1.0) -> Placed:
    """Split the blocks over a dense and two encoded segments; the open window is always dense."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lanes = range(len(scene.blocks))
    homes: list[list[list[Block]]] = [[[] for _ in lanes] for _ in range(3)]
    for lane in lanes:
        for block in scene.blocks[lane]:
            dense = block is scene.blocks[lane][-1] or chance.random() < dense_share
            homes[0 if dense else 1 + block.codec][lane].append(block)
    shelves = [shelve(home, chance) for home in homes]
    starts = [0, *itertools.accumulate(len(shelf.windows[0]) for shelf in shelves)]
    columns = [
        {
            number: start + column
            for shelf, start in zip(shelves, starts, strict=False)
            for number, column in shelf.columns[lane].items()
        }
        for lane in lanes
    ]
    present = torch.zeros(len(lanes), starts[-1], dtype=torch.bool)
    for lane in lanes:
        present[lane, list(columns[lane].values())] = True
    keys, values, hidden = dense_pools(scene, homes[0], shelves[0], generator, filler)
    heads = scene.sink_keys.shape[1]
    encoded = tuple(
        EncodedSegment(
            *CODECS[codec],
            key_codes=lent(shelf, generator, filler, heads, codec, keys=True),
            value_codes=lent(shelf, generator, filler, heads, codec, keys=False),
            slots=integers(shelf.slots),
            regions=tuple(shelf.regions),
            hidden=torch.tensor([slot not in shelf.pool for slot in range(sum(shelf.regions))]),
        )
        for codec, shelf in enumerate(shelves[1:])
    )
    view = View(
        sink_keys=scene.sink_keys,
        sink_values=scene.sink_values,
        keys=keys,
        values=values,
        slots=integers(shelves[0].slots),
        regions=tuple(shelves[0].regions),
        encoded=encoded,
        hidden=hidden,
        windows=torch.cat([integers(shelf.windows) for shelf in shelves], dim=1),
        present=present,
        lengths=scene.lengths,
        rotary=ROTARY,
        rotary_offset=scene.offsets,
    )
    return Placed(view, columns)


def integers(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), -1 if rows[0] else 0)


def dense_pools(
    scene: Scene, home: list[list[Block]], shelf: Shelf, generator: torch.Generator, filler: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Pools of rotated keys and of values, and what is hidden: free slots and unwritten tokens hold something else."""
    shape = (scene.sink_keys.shape[1], sum(shelf.regions), WINDOW, HEAD_DIM)
    keys, values = filler * normal(generator, *shape), filler * normal(generator, *shape)
    hidden = torch.ones(shape[1:3], dtype=torch.bool)
    lane_of = {id(block): lane for lane, blocks in enumerate(home) for block in blocks}
    for slot, block in shelf.pool.items():
        written = min(WINDOW, int(scene.lengths[lane_of[id(block)]]) - block.position)
        hidden[slot, :written] = False
        keys[:, slot, :written] = block.rotated[:, :written]
        values[:, slot, :written] = block.decoded[:, :written]
    return keys, values, hidden


def lent(shelf: Shelf, generator: torch.Generator, filler: float, heads: int, codec: int, *, keys: bool) -> Codes:
    """The arrays of an encoded pool; slots that belong to nobody hold codes of something else."""
    quantizer = CODECS[codec][0 if keys else 1]
    # fp16 scales end at 65504, so filler of an encoded pool stays below.
    junk = min(filler, 1e4) * normal(generator, heads, sum(shelf.regions), WINDOW, HEAD_DIM)
    arrays = {name: array.clone() for name, array in quantizer.encode(junk).items()}
    for slot, block in shelf.pool.items():
        for name, array in (block.keys if keys else block.values).items():
            arrays[name][:, slot] = array[:, 0]
    return arrays


class Expected(NamedTuple):
    """The answer of the loop; ``mass`` by lane, query head and window index."""

    output: Tensor
    lse: Tensor
    mass: list[list[dict[int, float]]]
    protected: Tensor


def by_loop(scene: Scene) -> Expected:
    """Token after token, in double precision."""
    query = scene.query
    lanes, heads, group, queries, _ = query.vectors.shape
    output = torch.zeros(query.vectors.shape, dtype=torch.float64)
    lse = torch.full(query.vectors.shape[:4], -math.inf, dtype=torch.float64)
    protected = torch.zeros(lanes, heads * group, dtype=torch.float64)
    mass: list[list[dict[int, float]]] = []
    for lane in range(lanes):
        by_head: list[dict[int, float]] = []
        for head in range(heads):
            tokens = tokens_of(scene, lane, head)
            for member in range(group):
                sums = dict.fromkeys((block.number for block in scene.blocks[lane]), 0.0)
                for number in range(queries):
                    asks = int(query.positions[lane, number])
                    seen = [token for token in tokens if token[1] <= asks]
                    if asks < 0 or not seen:
                        continue
                    vector = query.vectors[lane, head, member, number].double()
                    logits = torch.stack([vector @ key for _, _, key, _ in seen]) * query.scaling
                    if query.softcap is not None:
                        logits = query.softcap * torch.tanh(logits / query.softcap)
                    if query.sink_logits is not None:
                        logits = torch.cat((logits, query.sink_logits[lane, head, member, None].double()))
                    lse[lane, head, member, number] = logits.logsumexp(0)
                    for (window, _, _, value), share in zip(seen, logits.softmax(0), strict=False):
                        output[lane, head, member, number] += share * value
                        if window is None:
                            protected[lane, head * group + member] += share
                        else:
                            sums[window] += float(share)
                by_head.append(sums)
        mass.append(by_head)
    return Expected(output, lse, mass, protected)


def tokens_of(scene: Scene, lane: int, head: int) -> list[tuple[int | None, int, Tensor, Tensor]]:
    """Window (None for a sink), true position, key and value of every token that is there."""
    length = int(scene.lengths[lane])
    tokens: list[tuple[int | None, int, Tensor, Tensor]] = [
        (None, place, scene.sink_keys[lane, head, place].double(), scene.sink_values[lane, head, place].double())
        for place in range(min(SINKS, length))
    ]
    for block in scene.blocks[lane]:
        tokens += [
            (
                block.number,
                block.position + step,
                block.rotated[head, step].double(),
                block.decoded[head, step].double(),
            )
            for step in range(WINDOW)
            if block.position + step < length
        ]
    return tokens


def compare(scene: Scene, placed: Placed, expected: Expected) -> Attended:
    got = BACKEND.attend(scene.query, placed.view, want_mass=True)
    real = scene.query.positions >= 0
    torch.testing.assert_close(got.output.double(), expected.output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse.double(), expected.lse, rtol=1e-5, atol=1e-5)
    assert got.mass is not None
    assert got.protected_mass is not None
    torch.testing.assert_close(got.protected_mass.double(), expected.protected, rtol=1e-5, atol=1e-5)
    told = torch.zeros_like(got.mass)
    for lane, by_head in enumerate(expected.mass):
        for head, sums in enumerate(by_head):
            for window, amount in sums.items():
                told[lane, head, placed.columns[lane][window]] = amount
    torch.testing.assert_close(got.mass, told, rtol=1e-5, atol=1e-5)
    assert bool((got.mass[placed.view.absent[:, None].expand_as(got.mass)] == 0).all()), "filler has no mass at all"
    total, asked = got.mass.sum(-1) + got.protected_mass, real.sum(1, keepdim=True)
    if scene.query.sink_logits is None:
        torch.testing.assert_close(total, asked.float().expand_as(total), rtol=1e-5, atol=1e-5)
    else:
        assert bool((total < asked)[asked[:, 0] > 0].all())
    return got


@given(st.integers(0, 2**31), st.integers(0, 2**31), st.sampled_from([0.0, 0.5, 1.0]))
@settings(deadline=None, max_examples=25)
def test_attention_over_any_mixture_equals_the_loop(seed: int, layout: int, dense_share: float) -> None:
    """Output, log-sum-exp and masses; masses add up to the number of real queries."""
    scene = make_scene(seed)
    compare(scene, lay_out(scene, layout, dense_share=dense_share), by_loop(scene))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("softcap", "sinks"), [(1.5, False), (None, True), (1.5, True)])
def test_capped_logits_and_sink_logits_equal_the_loop(seed: int, softcap: float | None, *, sinks: bool) -> None:
    """Also where pads are asked, which see no sink logit."""
    scene = make_scene(seed)
    logits = 2 * normal(torch.Generator().manual_seed(seed), 3, 2, 2) if sinks else None
    scene = scene._replace(query=attrs.evolve(scene.query, softcap=softcap, sink_logits=logits))
    placed, expected = lay_out(scene, seed), by_loop(scene)
    compare(scene, placed, expected)
    plain = scene._replace(query=attrs.evolve(scene.query, softcap=None, sink_logits=None))
    assert float((by_loop(plain).output - expected.output).abs().max()) > 0.05, "the scene does not tell them apart"


@pytest.mark.parametrize(("heads", "group"), [(1, 1), (1, 4), (4, 1)])
def test_other_shapes_of_lanes(heads: int, group: int) -> None:
    """A lane of one KV head, and heads without groups."""
    scene = make_scene(7, heads=heads, group=group)
    compare(scene, lay_out(scene, 1), by_loop(scene))


def test_more_queries_than_fit_into_a_block() -> None:
    """A prompt is attended to in blocks of queries; masses add up over them."""
    scene = make_scene(3, lanes=1, heads=1, group=2, queries=5, windows=1)
    block = [make_block(torch.Generator().manual_seed(index), index, 0, 1, 0) for index in range(75)]
    length = SINKS + 75 * WINDOW
    generator = torch.Generator().manual_seed(0)
    query = Query(normal(generator, 1, 1, 2, length, HEAD_DIM), torch.arange(length)[None], HEAD_DIM**-0.5)
    prompt = scene._replace(
        blocks=[block], lengths=torch.tensor([length]), offsets=torch.zeros(1, dtype=torch.int64), query=query
    )
    got = BACKEND.attend(query, lay_out(prompt, 0, dense_share=1.0).view, want_mass=True)
    keys = torch.cat((prompt.sink_keys[0, 0], *(each.rotated[0] for each in block))).double()
    values = torch.cat((prompt.sink_values[0, 0], *(each.decoded[0] for each in block))).double()
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    logits = (query.vectors[0, 0].double() @ keys.T * query.scaling).masked_fill(~causal, -math.inf)
    torch.testing.assert_close(got.output[0, 0].double(), logits.softmax(-1) @ values, rtol=1e-5, atol=1e-5)
    assert got.mass is not None
    assert got.protected_mass is not None
    torch.testing.assert_close(
        (got.mass.sum(-1) + got.protected_mass)[0], torch.full((2,), float(length)), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        got.protected_mass[0].double(), logits.softmax(-1)[..., :SINKS].sum((-1, -2)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("seed", range(5))
def test_masses_alone_are_those_of_attention(seed: int) -> None:
    scene = make_scene(seed)
    view = lay_out(scene, seed).view
    attended = BACKEND.attend(scene.query, view, want_mass=True)
    silent = BACKEND.attend(scene.query, view, want_mass=False)
    assert attended.mass is not None
    assert torch.equal(BACKEND.mass(scene.query, view), attended.mass)
    assert silent.mass is None
    assert silent.protected_mass is None
    assert torch.equal(silent.output, attended.output)


@pytest.mark.parametrize("seed", range(5))
def test_pads_see_nothing_give_no_mass_and_make_no_nan(seed: int) -> None:
    scene = make_scene(seed)
    pads = (scene.query.positions < 0)[:, None, None].expand(scene.query.vectors.shape[:4])
    wild = attrs.evolve(scene.query, vectors=scene.query.vectors.masked_fill(pads[..., None], 1e6))
    view = lay_out(scene, seed).view
    got, again = (BACKEND.attend(query, view, want_mass=True) for query in (scene.query, wild))
    assert bool((got.output[pads] == 0).all())
    assert bool((got.lse[pads] == -math.inf).all())
    assert bool(got.lse[~pads].isfinite().all())
    assert bool(got.output.isfinite().all())
    assert got.mass is not None
    assert again.mass is not None
    assert torch.equal(got.mass, again.mass)
    only_pads = Query(scene.query.vectors, torch.full_like(scene.query.positions, -1), scene.query.scaling)
    nothing = BACKEND.attend(only_pads, view, want_mass=True)
    assert nothing.mass is not None
    assert nothing.protected_mass is not None
    assert float(nothing.mass.abs().sum() + nothing.protected_mass.abs().sum() + nothing.output.abs().sum()) == 0


def test_a_lane_ends_at_its_length_whoever_asks() -> None:
    """A later query sees nothing of the tokens that are not written yet, though they lie before it."""
    scene = make_scene(2)
    assert any(int(length) % WINDOW != SINKS % WINDOW for length in scene.lengths), "some last window must be open"
    later = torch.where(scene.query.positions < 0, -1, scene.query.positions + 50)
    scene = scene._replace(query=attrs.evolve(scene.query, positions=later))
    compare(scene, lay_out(scene, 0), by_loop(scene))


def test_sinks_beyond_a_short_row_are_not_attended_to() -> None:
    """A row of two tokens has two sinks, whatever stands in the third."""
    scene = make_scene(1, lanes=1, queries=2)
    block = make_block(torch.Generator().manual_seed(0), 0, 0, 2, 0)
    query = Query(scene.query.vectors, torch.tensor([[0, 1]]), scene.query.scaling)
    short = scene._replace(blocks=[[block]], lengths=torch.tensor([2]), query=query)
    compare(short, lay_out(short, 0), by_loop(short))


def test_lanes_are_strangers() -> None:
    """Each lane answers as it would alone, though it shares pools with others."""
    scene = make_scene(11)
    view = lay_out(scene, 2).view
    together = BACKEND.attend(scene.query, view, want_mass=True)
    for lane in range(3):
        alone = Scene(
            scene.blocks[lane : lane + 1],
            scene.sink_keys[lane : lane + 1],
            scene.sink_values[lane : lane + 1],
            scene.lengths[lane : lane + 1],
            scene.offsets[lane : lane + 1],
            Query(scene.query.vectors[lane : lane + 1], scene.query.positions[lane : lane + 1], scene.query.scaling),
        )
        got = BACKEND.attend(alone.query, lay_out(alone, 5).view, want_mass=True)
        torch.testing.assert_close(got.output[0], together.output[lane], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_queries_and_pools_are_attended_to_in_fp32(dtype: torch.dtype) -> None:
    """Only the output is rounded: a few units in the last place of the model's dtype, masses in fp32."""
    scene = make_scene(4)
    scene = scene._replace(query=attrs.evolve(scene.query, vectors=scene.query.vectors.to(dtype)))
    scene = scene._replace(sink_keys=scene.sink_keys.to(dtype), sink_values=scene.sink_values.to(dtype))
    rounded = [
        [each._replace(rotated=each.rotated.to(dtype).float(), decoded=each.decoded.to(dtype).float()) for each in lane]
        for lane in scene.blocks
    ]
    scene = scene._replace(blocks=rounded)
    placed = lay_out(scene, 0, dense_share=1.0)
    view = attrs.evolve(placed.view, keys=placed.view.keys.to(dtype), values=placed.view.values.to(dtype))
    expected = by_loop(scene)
    got = BACKEND.attend(scene.query, view, want_mass=True)
    assert got.output.dtype == dtype
    assert got.lse.dtype == torch.float32
    torch.testing.assert_close(got.lse.double(), expected.lse, rtol=1e-5, atol=1e-5)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.output.double(), expected.output, rtol=eps, atol=eps * 1e-2)
    assert got.protected_mass is not None
    torch.testing.assert_close(got.protected_mass.double(), expected.protected, rtol=1e-5, atol=1e-5)


def test_it_is_a_value_that_says_what_it_provides() -> None:
    assert {Need.MASS, Need.MASS_BY_QUERY} == BACKEND.provides
    assert ReferenceAttention() == BACKEND
    assert hash(ReferenceAttention()) == hash(BACKEND)
