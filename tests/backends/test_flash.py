"""The flash backend keeps the laws of backends, over pools cut in every way and codes of every kind."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qevict.backends import one_token, pieces
from qevict.backends.flash import FlashAttention
from qevict.backends.reference import ReferenceAttention
from qevict.contracts.backend import Setting
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.testing import BackendContract, Operators
from qevict.testing.laying import lay_out
from qevict.testing.scenes import BackendCase, make_scene

FLASH, REFERENCE = FlashAttention(), ReferenceAttention()
PAIRED = ((PerChannel(2), PerToken(2)), (PerChannel(4), PerToken(8)))
TOKENS = ((PerToken(4), PerToken(4)), (PerToken(8), PerToken(2)))


class TestFlashAttention(BackendContract):
    part = FLASH
    examples = 25


class TestCodesThatAreReadInPlace(BackendContract):
    """Windows of 8 tokens whose pairs fill 32 and 64 bits; values of 8 bits do not fill a word and are decoded."""

    part = FLASH
    codecs = PAIRED
    window_tokens = 8
    head_dim = 32
    examples = 15


class TestWindowsOfOneToken(BackendContract):
    """Keys with a grid per token."""

    part = FLASH
    codecs = TOKENS
    window_tokens = 1
    head_dim = 16
    examples = 12


CASES = st.builds(
    BackendCase,
    lanes=st.integers(1, 4),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    queries=st.integers(1, 3),
    sinks=st.integers(0, 6),
    windows=st.integers(0, 40),
    dense=st.integers(0, 10),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10_000),
    softcap=st.sampled_from([None, None, 2.0]),
    sink_logits=st.booleans(),
)


@given(CASES, st.sampled_from([(4, 16), (8, 64), (8, 96)]))
@settings(deadline=None, max_examples=60)
def test_it_answers_as_the_reference_does(case: BackendCase, shape: tuple[int, int]) -> None:
    """Rung 4 of the ladder: ragged lanes, gaps, any split over tiers and bits, several head sizes."""
    scene = make_scene(case, PAIRED, *shape)
    view = lay_out(scene, case.seed).view
    ours, theirs = (backend.attend(scene.query, view, want_mass=True) for backend in (FLASH, REFERENCE))
    eps = 1e-5 if case.dtype == torch.float32 else 4 * torch.finfo(case.dtype).eps
    torch.testing.assert_close(ours.output, theirs.output, rtol=eps, atol=eps)
    torch.testing.assert_close(ours.lse, theirs.lse, rtol=1e-5, atol=1e-5)
    for own, other in ((ours.mass, theirs.mass), (ours.protected_mass, theirs.protected_mass)):
        assert own is not None
        assert other is not None
        torch.testing.assert_close(own, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("lanes", "queries", "padded", "way"),
    [(1, 1, False, "even"), (1, 1, True, "pieces"), (3, 1, False, "either"), (1, 4, False, "many")],
)
def test_every_way_is_taken(
    lanes: int, queries: int, way: str, monkeypatch: pytest.MonkeyPatch, *, padded: bool
) -> None:
    """So that what is tested above is known to be all of it."""
    taken = []

    def spy(module: Any, name: str) -> None:
        plain = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            taken.append(name)
            return plain(*args, **options)

        monkeypatch.setattr(module, name, call)

    spy(one_token, "attend")
    spy(pieces, "one_token")
    spy(pieces, "many_tokens")
    for seed in range(20):
        scene = make_scene(BackendCase(lanes, 2, 2, queries, 2, 9, 5, torch.float32, seed), PAIRED, 8, 32)
        query = attrs.evolve(scene.query, padded=padded or bool((scene.query.positions < 0).any()))
        FLASH.attend(query, lay_out(scene, seed).view, want_mass=True)
    wanted = {"even": {"attend"}, "pieces": {"one_token"}, "either": {"attend", "one_token"}, "many": {"many_tokens"}}
    assert set(taken) == wanted[way]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("lanes", "queries"), [(1, 1), (3, 1), (2, 4)])
def test_a_query_that_sees_nothing_but_a_sink_logit(lanes: int, queries: int, softcap: float | None) -> None:
    """Zeros and the sink logit itself; no NaN, whatever lies in what is hidden."""
    case = BackendCase(lanes, 2, 2, queries, 0, 9, 5, torch.float32, 1, softcap=softcap, sink_logits=True)
    scene = make_scene(case, PAIRED, 8, 32)
    full = lay_out(scene, 1, filler=1e6).view
    encoded = tuple(attrs.evolve(each, hidden=torch.ones_like(each.hidden)) for each in full.encoded)
    nothing: Any = {
        "hidden": torch.ones_like(full.hidden),
        "present": torch.zeros(full.windows.shape, dtype=torch.bool),
    }
    view = attrs.evolve(full, encoded=encoded, lengths=torch.zeros_like(full.lengths), **nothing)
    for query in (scene.query, attrs.evolve(scene.query, padded=True)):
        for backend in (FLASH, REFERENCE):
            got, alone = backend.attend(query, view, want_mass=True), backend.mass(query, view)
            assert got.mass is not None
            assert got.protected_mass is not None
            assert query.sink_logits is not None
            for zeros in (got.output, got.mass, got.protected_mass, alone):
                assert bool((zeros == 0).all())
            real = query.positions[:, None, None] >= 0
            wanted = torch.where(real, query.sink_logits[..., None], -torch.inf)
            torch.testing.assert_close(got.lse, wanted)


@pytest.mark.parametrize("loud", [-300.0, 300.0])
@pytest.mark.parametrize(("lanes", "queries"), [(1, 1), (3, 1), (2, 4)])
def test_sink_logits_that_take_all_or_nothing(lanes: int, queries: int, loud: float) -> None:
    case = BackendCase(lanes, 2, 2, queries, 3, 9, 5, torch.float32, 1, sink_logits=True)
    scene = make_scene(case, PAIRED, 8, 32)
    query, view = attrs.evolve(scene.query, sink_logits=torch.full((lanes, 2, 2), loud)), lay_out(scene, 1).view
    got, alone = FLASH.attend(query, view, want_mass=True), FLASH.mass(query, view)
    plain = REFERENCE.attend(attrs.evolve(query, sink_logits=None), view, want_mass=True)
    assert got.mass is not None
    assert plain.mass is not None
    kept = float(loud < 0)
    torch.testing.assert_close(got.output, kept * plain.output, rtol=1e-5, atol=1e-5)
    for mass in (got.mass, alone):
        torch.testing.assert_close(mass, kept * plain.mass, rtol=1e-5, atol=2e-5)


def test_what_no_model_asks_for_costs_no_operator() -> None:
    """One token, with and without: a cap is three operators for each segment, a sink logit a few in all."""
    case = BackendCase(1, 2, 2, 1, 3, 9, 5, torch.float32, 1)
    scene = make_scene(case, PAIRED, 8, 32)
    view, counts = lay_out(scene, 1).view, []
    sinks = torch.zeros(1, 2, 2)
    for changes in ({}, {"softcap": 2.0}, {"sink_logits": sinks}):
        with Operators() as seen:
            FLASH.attend(attrs.evolve(scene.query, **changes), view, want_mass=True)
        counts.append(seen.names)
    plain, with_cap, with_sinks = counts
    assert plain["tanh_"] == 0
    assert (with_cap - plain).total() == 3 * (2 + len(view.encoded))
    assert (with_sinks - plain).total() <= 3


def test_threads_change_nothing_beyond_rounding() -> None:
    scene = make_scene(BackendCase(3, 3, 3, 1, 5, 60, 5, torch.float32, 0), PAIRED, 8, 64)
    view, before = lay_out(scene, 0).view, torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(FLASH.attend(scene.query, view, want_mass=True))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[0].output, found[1].output, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[0].mass, found[1].mass, rtol=1e-6, atol=1e-6)


def test_logits_beyond_what_exp_can_take() -> None:
    """The largest logit of each strip is taken off first, also where one segment holds nothing but small ones."""
    scene = make_scene(BackendCase(2, 2, 2, 1, 3, 12, 5, torch.float32, 3), PAIRED, 8, 32)
    loud = attrs.evolve(scene.query, scaling=400.0)
    view = lay_out(scene, 3).view
    ours, theirs = (backend.attend(loud, view, want_mass=True) for backend in (FLASH, REFERENCE))
    torch.testing.assert_close(ours.output, theirs.output, rtol=1e-3, atol=1e-3)
    assert ours.mass is not None
    assert bool(ours.mass.isfinite().all())


def test_it_says_why_it_is_chosen() -> None:
    """Device, operator and how codes are read."""
    cpu = torch.device("cpu")
    assert FLASH.reason(Setting(cpu, torch.float32, 8, (), 64)) == (
        "on cpu through aten::_scaled_dot_product_flash_attention_for_cpu"
    )
    assert FLASH.reason(Setting(cpu, torch.bfloat16, 8, (PAIRED[0],), 64)).endswith(", codes read in place")
    assert FLASH.reason(Setting(cpu, torch.bfloat16, 8, PAIRED, 64)).endswith(", codes decoded at every step")
    assert "plain torch" in FLASH.reason(Setting(torch.device("meta"), torch.bfloat16, 8, (), 64))
    assert "do not cap logits" in FLASH.reason(Setting(cpu, torch.bfloat16, 8, (), 64, softcap=50.0))
    assert REFERENCE.reason(Setting(cpu, torch.float32, 8, (), 64)) is None
