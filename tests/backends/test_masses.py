"""The fast masses against the reference's, over ragged lanes with pads, filler, gaps and any honest claim."""

import random
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qevict.backends import masses as module
from qevict.backends.masses import Columns
from qevict.backends.reference import ReferenceAttention, gather
from qevict.contracts.backend import Known, Query, View
from qevict.testing import Operators

HEAD_DIM = 8
MIB = 2**20


@attrs.frozen
class Case:
    """What lanes hold and who asks; ``loud`` is the size of what lies in filler and unwritten tokens."""

    lengths: tuple[int, ...]
    queries: int
    sinks: int
    window: int
    spacing: int
    gaps: bool
    sorted_windows: bool
    dtype: torch.dtype
    seed: int
    loud: float = 1.0
    softcap: float | None = None
    sink_logits: bool = False


CASES = st.builds(
    Case,
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3).map(tuple),
    queries=st.integers(1, 40),
    sinks=st.integers(0, 5),
    window=st.sampled_from([1, 4, 8]),
    spacing=st.sampled_from([1, 1, 2, 5]),
    gaps=st.booleans(),
    sorted_windows=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
    softcap=st.sampled_from([None, None, 2.0]),
    sink_logits=st.booleans(),
)


@attrs.frozen(eq=False)
class Scene:
    """A case worked out."""

    query: Query
    view: View
    known: Known
    ascending: int

    @property
    def columns(self) -> Columns:
        held = gather(self.view)
        keys = held.keys.to(self.view.keys.dtype)
        return Columns(keys, held.positions, held.present, held.sinks, held.window, self.ascending)


def masses(query: Query, columns: Columns, known: Known | None = None) -> tuple[Tensor, Tensor]:
    """The masses, where the host knows so much of the queries."""
    return module.masses(attrs.evolve(query, known=known or Known()), columns)


def make(case: Case) -> Scene:
    """Windows that hold a query stay, of the others some may be gone; the widest lane too ends in filler."""
    chance, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    asked = [asked_by(case, length) for length in case.lengths]
    kept = [kept_by(case, length, own, chance) for length, own in zip(case.lengths, asked, strict=True)]
    width, lanes, heads = max(map(len, kept)) + chance.randint(0, 2), len(kept), 2
    indices = [lane + [chance.choice([0, 5, 900]) for _ in range(width - len(lane))] for lane in kept]
    windows = torch.tensor(indices, dtype=torch.int64).view(lanes, width)
    positions = case.sinks + case.window * windows
    present = torch.arange(width) < torch.tensor([[len(lane)] for lane in kept])
    lengths = torch.tensor(case.lengths)
    pool = torch.randn(heads, lanes * width, case.window, HEAD_DIM, generator=generator)
    there = present[..., None] & (positions[..., None] + torch.arange(case.window) < lengths[:, None, None])
    pool = torch.where(there.flatten(0, 1)[None, ..., None], pool, case.loud * pool).to(case.dtype)
    sinks = torch.randn(lanes, heads, case.sinks, HEAD_DIM, generator=generator)
    unwritten = torch.arange(case.sinks) >= lengths[:, None]
    sinks = torch.where(unwritten[:, None, :, None], case.loud * sinks, sinks).to(case.dtype)
    vectors = 2 * torch.randn(lanes, heads, 3, case.queries, HEAD_DIM, generator=generator)
    slots = torch.arange(lanes * width).view(lanes, width)
    view = View(
        sink_keys=sinks,
        sink_values=sinks,
        keys=pool,
        values=pool,
        slots=slots,
        regions=(width,) * lanes,
        hidden=~there.flatten(0, 1),
        encoded=(),
        windows=windows,
        present=present,
        lengths=lengths,
        rotary=None,
        rotary_offset=torch.zeros_like(lengths),
    )
    logits = 2 * torch.randn(lanes, heads, 3, generator=generator) if case.sink_logits else None
    query = Query(vectors.to(case.dtype), torch.tensor(asked), HEAD_DIM**-0.5, softcap=case.softcap, sink_logits=logits)
    return Scene(query, view, claims(case), width if case.sorted_windows else 0)


def asked_by(case: Case, length: int) -> list[int]:
    """The last query is at the lane's end, and the others lie before it; the rest are pads."""
    places = [length - 1 - case.spacing * later for later in reversed(range(case.queries))]
    return [max(place, -1) for place in places]


def kept_by(case: Case, length: int, asked: list[int], chance: random.Random) -> list[int]:
    windows = range(max(0, -(-(length - case.sinks) // case.window)))
    needed = {(place - case.sinks) // case.window for place in asked}
    kept = [each for each in windows if not case.gaps or each in needed or chance.random() < 0.6]
    return kept if case.sorted_windows else chance.sample(kept, len(kept))


def claims(case: Case) -> Known:
    """All that is true of a case."""
    whole = case.sorted_windows and not case.gaps
    return Known(longest=max(case.lengths), shortest=min(case.lengths) if whole else 0, spacing=case.spacing)


@pytest.fixture(params=[None, (1, 1), (2, 5)], ids=["own sizes", "one by one", "small blocks"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few lanes and queries put every case over many of their edges."""

    def fit(*args: int, on_cpu: bool) -> module._Sizes:
        return module._Sizes(*request.param)

    if request.param:
        monkeypatch.setattr(module._Sizes, "fit", fit)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.usefixtures("sizes")
@given(CASES)
@settings(deadline=None, max_examples=40)
def test_they_are_the_masses_of_the_reference(case: Case) -> None:
    """Whatever is claimed, as long as it is true."""
    scene = make(case)
    wanted = ReferenceAttention().mass(scene.query, scene.view)
    for known in (None, scene.known, attrs.evolve(scene.known, shortest=0), Known(longest=70)):
        _, got = masses(scene.query, scene.columns, known)
        assert got.dtype == torch.float32
        close(got, wanted)


@pytest.mark.usefixtures("sizes")
@given(CASES)
@settings(deadline=None, max_examples=20)
def test_all_masses_add_up_to_the_number_of_queries_that_are_no_pads(case: Case) -> None:
    scene = make(attrs.evolve(case, sink_logits=False))
    protected, mass = masses(scene.query, scene.columns, scene.known)
    asked = (scene.query.positions >= 0).sum(1, keepdim=True).expand(-1, 6)
    close(protected + mass.sum(-1), asked.float())


@pytest.mark.usefixtures("sizes")
@given(CASES, st.sampled_from([1e4, float("inf"), float("nan")]))
@settings(deadline=None, max_examples=20)
def test_what_lies_in_filler_and_unwritten_tokens_changes_nothing(case: Case, loud: float) -> None:
    quiet, other = make(case), make(attrs.evolve(case, loud=loud))
    one, two = (masses(scene.query, scene.columns, scene.known) for scene in (quiet, other))
    assert all(map(torch.equal, one, two))
    filler = one[1].masked_fill(~quiet.view.absent[:, None], 0)
    assert (filler == 0).all()


@given(CASES)
@settings(deadline=None, max_examples=20)
def test_what_a_pad_asks_changes_nothing(case: Case) -> None:
    """It may be no number; bounds are claimed of the other queries."""
    scene = make(case)
    pads = torch.arange(case.queries) % 3 == 1
    positions = scene.query.positions.masked_fill(pads, -1)
    one, two = (
        masses(
            attrs.evolve(
                scene.query, vectors=scene.query.vectors * torch.where(pads, by, 1.0)[:, None], positions=positions
            ),
            scene.columns,
            scene.known,
        )
        for by in (1.0, float("nan"))
    )
    assert all(map(torch.equal, one, two))
    close(one[1], ReferenceAttention().mass(attrs.evolve(scene.query, positions=positions), scene.view))


def plain(tokens: int, queries: int, *, lanes: int = 1, heads: int = 1, group: int = 1, window: int = 1) -> Any:
    """A prompt that is there in full, in windows alone; the last ``queries`` ask."""
    width = -(-tokens // window) * window
    positions = torch.arange(width).expand(lanes, -1)
    keys = torch.randn(lanes, heads, width, HEAD_DIM)
    columns = Columns(keys, positions, positions < tokens, 0, window, width // window)
    vectors = torch.randn(lanes, heads, group, queries, HEAD_DIM)
    query = Query(vectors, positions[:, tokens - queries : tokens], HEAD_DIM**-0.5)
    return query, columns, Known(tokens, tokens, 1)


def test_three_queries_to_which_all_keys_are_alike() -> None:
    """Each gives the same to whatever it sees: all to one token, halves, thirds."""
    query, columns, known = plain(3, 3)
    _, mass = masses(attrs.evolve(query, vectors=torch.zeros_like(query.vectors)), columns, known)
    torch.testing.assert_close(mass[0, 0], torch.tensor([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3]))
    protected, mass = masses(
        attrs.evolve(query, vectors=torch.zeros_like(query.vectors)), attrs.evolve(columns, sinks=1, window=2), known
    )
    torch.testing.assert_close(protected[0, 0], torch.tensor(1 + 1 / 2 + 1 / 3))
    torch.testing.assert_close(mass[0, 0], torch.tensor([1 / 2 + 2 / 3]))


@pytest.mark.parametrize("columns", [0, 5])
def test_nobody_asks_or_nothing_is_there(columns: int) -> None:
    query, held, known = plain(columns, 0)
    protected, mass = masses(query, held, known)
    assert protected.tolist() == [[0.0]]
    assert mass.tolist() == [[[0.0] * columns]]


def test_what_a_block_cannot_see_is_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1024 queries over 1024 keys about half, and no more than one block beyond."""
    products: list[int] = []
    plain_bmm = torch.bmm

    def bmm(*args: Tensor, out: Tensor) -> Tensor:
        products.append(out.numel())
        return plain_bmm(*args, out=out)

    monkeypatch.setattr(torch, "bmm", bmm)
    query, columns, known = plain(1024, 1024, window=8)
    masses(query, columns, known)
    assert sum(products) <= 1024 * (1024 + 64) / 2
    products.clear()
    every = attrs.evolve(query, vectors=query.vectors[:, :, :, 3::4], positions=query.positions[:, 3::4])
    masses(every, columns, attrs.evolve(known, spacing=4))
    assert sum(products) <= 256 * (1024 + 4 * 64) / 2


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("count", [1, 30, 256, 4096])
@pytest.mark.parametrize("lanes", [1, 2, 64])
def test_extra_memory_is_bounded_for_any_batch(lanes: int, count: int, on_cpu: bool) -> None:
    """At 4096 tokens and 9 query heads of 64 channels: two copies of keys, logits, softmax's own, three of masks."""
    width = 4096
    sizes = module._Sizes.fit(3, 3, count, width, 64, on_cpu=on_cpu)
    at_once, copies = min(lanes, sizes.lanes), 1 if on_cpu else 2
    logits = at_once * 9 * sizes.queries * width * 4
    keys, masks = 2 * at_once * 3 * width * 64 * 4, 3 * at_once * sizes.queries * width * 4
    assert copies * logits + keys + masks <= 150 * MIB
    assert sizes.queries >= min(count, 64)


def test_no_square_matrix_and_no_question_to_the_device() -> None:
    query, columns, known = plain(2048, 2048, lanes=2, heads=2, group=2, window=8)
    for claimed in (known, None):
        with Operators() as operators:
            masses(query, columns, claimed)
        assert not operators.waits
        assert operators.largest < 2048 * 2048


def test_threads_change_nothing_beyond_rounding() -> None:
    query, columns, known = plain(700, 700, heads=3, group=3, window=8)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(masses(query, columns, known)[1])
    finally:
        torch.set_num_threads(before)
    close(*found)


def test_nothing_is_changed_and_nothing_is_differentiated() -> None:
    query, columns, known = plain(40, 40, window=8)
    query.vectors.requires_grad_()
    before = query.vectors.clone(), columns.keys.clone()
    _, mass = masses(query, columns, known)
    assert not mass.requires_grad
    assert torch.equal(query.vectors, before[0])
    assert torch.equal(columns.keys, before[1])
