"""The operator answers as the reference backend does, over everything that it is compiled for, and refuses the rest."""

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from qevict.backends.reference import ReferenceAttention
from qevict.contracts.backend import Attended, Query, View
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.testing.scenes import Codecs
from qevict_fused import FusedAttention
from qevict_fused.layouts import reading, told
from tests.fused import has_avx2, needs_operator
from tests.fused.layouts import BITS, PLAIN, SCOPES, TRANSFORMED
from tests.fused.views import Sizes, make

pytestmark = needs_operator

INSTRUCTIONS = [
    "portable",
    pytest.param("avx2", marks=pytest.mark.skipif(not has_avx2, reason="this processor has no AVX2")),
]


def require_equal(query: Query, view: View, instructions: Any = None, *, rtol: float = 1e-5) -> Attended:
    """The fused backend answers as the reference backend does."""
    got = FusedAttention(instructions=instructions).attend(query, view, want_mass=True)
    wanted = ReferenceAttention().attend(query, view, want_mass=True)
    torch.testing.assert_close(got.output.float(), wanted.output.float(), rtol=rtol, atol=rtol)
    exact = rtol if query.vectors.dtype == torch.float32 else 1e-5
    torch.testing.assert_close(got.lse, wanted.lse, rtol=exact, atol=exact)
    for own, theirs in ((got.mass, wanted.mass), (got.protected_mass, wanted.protected_mass)):
        torch.testing.assert_close(own, theirs, rtol=exact, atol=exact)
    return got


# ── Rung 4: everything that is compiled ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("group", [*range(1, 10), 16, 19])
def test_any_group(group: int, instructions: str) -> None:
    require_equal(*make(Sizes(group=group, heads=2), (*PLAIN, *TRANSFORMED)), instructions)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 112, 128, 160, 256])
def test_any_head_dim(head_dim: int, instructions: str) -> None:
    require_equal(*make(Sizes(head_dim=head_dim, group=3), (*PLAIN, *SCOPES, *TRANSFORMED)), instructions)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("window", [2, 4, 6, 8, 12, 16, 40, 64])
def test_any_window(window: int, instructions: str) -> None:
    query, view = make(Sizes(window=window, group=2), (*PLAIN, *SCOPES, *TRANSFORMED))
    require_equal(query, view, instructions, rtol=1e-5 if window < 40 else 5e-5)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype(dtype: torch.dtype, parameters: torch.dtype, instructions: str) -> None:
    codecs = tuple((PerChannel(bits, parameters), PerToken(bits, parameters)) for bits in BITS)
    rtol = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    require_equal(*make(Sizes(dtype=dtype, group=3), codecs), instructions, rtol=rtol)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("turning", [16, 20, 32, 48])
def test_only_some_channels_turn(turning: int, instructions: str) -> None:
    require_equal(*make(Sizes(turning=turning, group=3), (*PLAIN, *TRANSFORMED)), instructions)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("coded", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("lanes", [1, 3])
def test_any_number_of_windows(coded: int, lanes: int, instructions: str) -> None:
    """Pieces hold 64 windows of 8 tokens. Angles that the model rounds at position 3700 are 1e-4 off."""
    query, view = make(Sizes(coded=coded, dense=65, lanes=lanes, group=3, heads=2), PLAIN[:2])
    require_equal(query, view, instructions, rtol=1e-4 if coded > 65 else 2e-5)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_positions_far_out(instructions: str) -> None:
    """Angles of 131072 radians are rounded to a 128th, once by the window here, and for each token by the model."""
    query, view = make(Sizes(), PLAIN)
    require_equal(query, attrs.evolve(view, rotary_offset=torch.tensor([131072])), instructions, rtol=1e-2)


# ── What lies there may be anything ───────────────────────────────────────────────────────────────


def test_nothing_at_all() -> None:
    got = require_equal(*make(Sizes(coded=0, dense=1, sinks=0), ()))
    assert got.lse.isfinite().all()
    query, view = make(Sizes(lanes=2, coded=2, dense=1), PLAIN[:1])
    empty = attrs.evolve(view, lengths=torch.tensor([0, int(view.lengths[1])]))
    got = FusedAttention().attend(query, empty, want_mass=True)
    assert not got.output[0].any()
    assert (got.lse[0] == -torch.inf).all()
    assert not got.mass[0].any()  # type: ignore[index]
    alone = make(Sizes(lanes=2, coded=2, dense=1), PLAIN[:1])
    torch.testing.assert_close(got.output[1], FusedAttention().attend(*alone, want_mass=True).output[1])


def test_logits_of_minus_infinity_get_nothing() -> None:
    query, view = make(Sizes(group=2), PLAIN[:1])
    asking = attrs.evolve(query, vectors=query.vectors.abs())
    keys = view.keys.clone()
    keys[0, 0, 3] = -torch.inf
    require_equal(asking, attrs.evolve(view, keys=keys))


@pytest.mark.parametrize("where", ["a channel", "a window", "the query"])
def test_what_is_no_number_is_not_hidden(where: str) -> None:
    """Also where a piece has nothing else: the sinks are one, the dense window another."""
    query, view = make(Sizes(dense=1), PLAIN[:1])
    keys, vectors = view.keys.clone(), query.vectors.clone()
    if where == "the query":
        vectors[..., 7] = torch.nan
    else:
        keys[0, 0, 3 if where == "a channel" else slice(None), 5] = torch.nan
    given = attrs.evolve(query, vectors=vectors), attrs.evolve(view, keys=keys)
    for backend in (FusedAttention(), ReferenceAttention()):
        got = backend.attend(*given, want_mass=True)
        assert got.output.isnan().all()
        assert got.lse.isnan().all()


@pytest.mark.parametrize("codecs", [SCOPES, TRANSFORMED], ids=["scopes", "transformed"])
def test_lanes_share_nothing_with_each_other(codecs: Codecs) -> None:
    """What the windows of a lane have in common is another one in each."""
    require_equal(*make(Sizes(lanes=3, heads=2, group=2), codecs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    query, view = make(Sizes(), ((PerChannel(4, levels="normal"), PerToken(3, levels="normal")),))
    reading.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        got = FusedAttention().attend(query, view, want_mass=False)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got.output, ReferenceAttention().attend(query, view, want_mass=False).output)


@pytest.mark.parametrize("codecs", [PLAIN, SCOPES, TRANSFORMED], ids=["plain", "scopes", "transformed"])
def test_views_need_not_be_aligned(codecs: Codecs) -> None:
    query, view = make(Sizes(group=3, heads=2), codecs)
    first = FusedAttention().attend(query, view, want_mass=True)
    segments = tuple(
        attrs.evolve(
            segment,
            key_codes={name: shifted(array) for name, array in segment.key_codes.items()},
            value_codes={name: shifted(array) for name, array in segment.value_codes.items()},
            slots=shifted(segment.slots),
        )
        for segment in view.encoded
    )
    other = attrs.evolve(
        view,
        keys=shifted(view.keys),
        values=shifted(view.values),
        sink_keys=shifted(view.sink_keys),
        sink_values=shifted(view.sink_values),
        slots=shifted(view.slots),
        encoded=segments,
    )
    again = FusedAttention().attend(attrs.evolve(query, vectors=shifted(query.vectors)), other, want_mass=True)
    assert torch.equal(again.output, first.output)
    assert torch.equal(again.mass, first.mass)  # type: ignore[arg-type]


def shifted(tensor: Tensor) -> Tensor:
    """The same numbers, an element behind where an allocation begins."""
    room = tensor.new_empty(tensor.numel() + 1)[1:]
    return room.copy_(tensor.flatten()).view(tensor.shape)


def test_slots_in_any_order_and_integers_of_any_width() -> None:
    query, view = make(Sizes(coded=70, group=3), PLAIN[:1])
    first = FusedAttention().attend(query, view, want_mass=True)
    order = torch.randperm(70)
    (segment,) = view.encoded
    moved = attrs.evolve(
        segment,
        key_codes={name: array[:, order] for name, array in segment.key_codes.items()},
        value_codes={name: array[:, order] for name, array in segment.value_codes.items()},
        slots=order.argsort()[None],
    )
    again = FusedAttention().attend(
        query, attrs.evolve(view, encoded=(moved,), windows=view.windows.long()), want_mass=True
    )
    assert torch.equal(again.output, first.output)


def test_answers_do_not_depend_on_the_number_of_threads() -> None:
    query, view = make(Sizes(lanes=2, heads=3, group=3, coded=300, dense=70), (*PLAIN[:1], *TRANSFORMED[:1]))
    before, answers = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            answers.append(FusedAttention().attend(query, view, want_mass=True))
    finally:
        torch.set_num_threads(before)
    for other in answers[1:]:
        assert torch.equal(other.output, answers[0].output)
        assert torch.equal(other.lse, answers[0].lse)
        assert torch.equal(other.mass, answers[0].mass)  # type: ignore[arg-type]


# ── What is refused ───────────────────────────────────────────────────────────────────────────────

Spoil = Callable[[dict[str, Any]], None]


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the backend would hand over, by name."""
    seen: list[tuple[Any, ...]] = []
    operator = torch.ops.qevict_fused.attend.default

    def watch(*given: Any) -> Any:
        seen.append(given)
        return operator(*given)

    with monkeypatch.context() as patched:
        patched.setattr(torch.ops.qevict_fused.attend, "default", watch)
        FusedAttention().attend(*make(Sizes(lanes=2, heads=2, group=2), SCOPES[:1]), want_mass=True)
    return dict(zip(names(), seen[0], strict=True))


def names() -> list[str]:
    return [each.name for each in torch.ops.qevict_fused.attend.default._schema.arguments]


def put(name: str, change: Callable[[Any], Any]) -> Spoil:
    def spoil(given: dict[str, Any]) -> None:
        given[name] = change(given[name])

    return spoil


def put_array(index: int, change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(given: dict[str, Any]) -> None:
        given["arrays"] = [change(own) if place == index else own for place, own in enumerate(given["arrays"])]

    return spoil


def freed(tensor: Tensor) -> Tensor:
    """The same shape over nothing."""
    copied = tensor.clone()
    copied.untyped_storage().resize_(0)
    return copied


HOSTILE: dict[str, tuple[Spoil, str]] = {
    "queries of two tokens": (put("queries", lambda x: x.repeat(1, 1, 1, 2, 1)), "queries must be"),
    "queries of integers": (put("queries", lambda x: x.int()), "queries must be float32"),
    "an odd head_dim": (put("queries", lambda x: x[..., :60]), "no multiple of 16"),
    "positions of another batch": (put("positions", lambda x: x[:1]), "positions must be"),
    "positions as floats": (put("positions", lambda x: x.float()), "positions must be int32 or int64"),
    "lengths of one lane": (put("lengths", lambda x: x[:1]), "lengths must be"),
    "sinks of other heads": (put("sink_keys", lambda x: x[:, :1]), "sink_keys must be"),
    "values of other windows": (put("values", lambda x: x[:, :, :4]), "values must be"),
    "keys that are strided": (put("keys", lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)), "contiguous"),
    "keys of doubles": (put("keys", lambda x: x.double()), "keys must be float32"),
    "slots outside": (put("slots", lambda x: x + 1), "points at slot 4 of 4"),
    "negative slots": (put("slots", lambda x: x - 1), "points at slot -1 of 4"),
    "slots as a vector": (put("slots", lambda x: x[0]), "slots must be"),
    "too few windows": (put("windows", lambda x: x[:, :4]), "columns"),
    "windows of one lane": (put("windows", lambda x: x[:1]), "windows must be"),
    "keys of three axes": (put("keys", lambda x: x[0]), "keys must have windows"),
    "keys of endless windows": (
        put("keys", lambda x: x.as_strided((x.shape[0], 0, 2**59, x.shape[3]), (0, 0, x.shape[3], 1))),
        "fewer than a million",
    ),
    "keys that were freed": (put("keys", freed), "keys has no storage"),
    "slots of one lane": (put("slots", lambda x: x[:1]), "slots must be"),
    "too many windows": (put("windows", lambda x: torch.cat((x, x), dim=1)), "10 windows, but 5 columns"),
    "negative windows": (put("windows", lambda x: x - 7), "is none"),
    "windows far beyond": (put("windows", lambda x: x.long() + 2**41), "is none"),
    "present as numbers": (put("present", lambda _: torch.ones(2, 5)), "present has the wrong dtype"),
    "present of other columns": (put("present", lambda _: torch.ones(2, 4, dtype=torch.bool)), "present must be"),
    "sink logits of other heads": (put("sink_logits", lambda _: torch.zeros(2, 2, 3)), "sink_logits must be"),
    "no frequencies": (put("frequencies", lambda _: None), "need frequencies"),
    "too many frequencies": (put("frequencies", lambda x: x.repeat(2)), "64 pairs turn, of 64 channels"),
    "codes cut short": (put_array(1, lambda x: x[..., :-1]), "codes must be"),
    "codes of shorts": (put_array(1, lambda x: x.short()), "codes has the wrong dtype"),
    "scales of bytes": (put_array(2, lambda x: x.byte()), "scale must be float32"),
    "scales of fewer slots": (put_array(2, lambda x: x[:, :1]), "scale must be"),
    "slots of codes outside": (put_array(0, lambda x: x + 1), "slots of codes points at slot 6 of 6"),
    "an array too few": (put("arrays", lambda x: x[:-1]), "more arrays than there are"),
    "an array too many": (put("arrays", lambda x: [*x, x[-1]]), "8 arrays, but formats ask for 7"),
    "formats cut short": (put("formats", lambda x: x[:-1]), "formats have 15 numbers"),
    "five bits": (put("formats", lambda x: [5, *x[1:]]), "codes of 5 bits"),
    "scales of two bits": (put("formats", lambda x: [x[0], 2, *x[2:]]), "scales of 2 bits"),
    "groups that do not divide": (put("formats", lambda x: [*x[:2], 7, *x[3:]]), "groups of 7 channels"),
    "keys that are scaled": (put("formats", lambda x: [*x[:5], 1, *x[6:]]), "neither scales by channel of keys"),
    "values of norms": (put("formats", lambda x: [*x[:12], 1, *x[13:]]), "nor norms of values"),
    "unknown instructions": (put("instructions", lambda _: "avx1024"), "instructions are"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_arguments_are_refused(name: str, arguments: dict[str, Any]) -> None:
    spoil, said = HOSTILE[name]
    spoil(arguments)
    with pytest.raises((RuntimeError, NotImplementedError), match=said):
        torch.ops.qevict_fused.attend.default(*arguments.values())


@pytest.mark.parametrize("name", ["positions", "lengths"])
@pytest.mark.parametrize("number", [-1, -2, -(2**62), 2**63 - 1])
def test_positions_and_lengths_may_be_anything(name: str, number: int, arguments: dict[str, Any]) -> None:
    """Nothing is seen below 0; nothing beyond what there is."""
    before = torch.ops.qevict_fused.attend.default(*arguments.values())
    arguments[name] = torch.full_like(arguments[name], number)
    arguments["present"] = torch.tensor([[True, False, True, True, True]] * 2)
    output, lse, _ = torch.ops.qevict_fused.attend.default(*arguments.values())
    assert output.shape == before[0].shape
    assert (lse == -torch.inf).all() == (number < 0)


def test_every_argument_is_spoilt_in_some_way() -> None:
    numbers = {"scaling", "softcap", "amplitude", "want_mass", "offsets", "sink_values"}
    named = " ".join(HOSTILE) + " " + " ".join(said for _, said in HOSTILE.values())
    missing = [name for name in names() if name not in numbers and name.split("_")[0] not in named]
    assert not missing


def test_a_trace_leaves_nothing_behind() -> None:
    """Layouts are remembered; a tensor that a trace made must not be."""
    query, view = make(Sizes(), TRANSFORMED[1:2])
    with FakeTensorMode():
        told(view)
    assert torch.isfinite(FusedAttention().attend(query, view, want_mass=True).output).all()


def test_shapes_are_known_without_computing(arguments: dict[str, Any]) -> None:
    """What traces a model, such as torch.compile, asks for it."""
    real = torch.ops.qevict_fused.attend.default(*arguments.values())
    given = {**arguments, "arrays": [own.to("meta") for own in arguments["arrays"]]}
    given = {name: own.to("meta") if isinstance(own, Tensor) else own for name, own in given.items()}
    sketched = torch.ops.qevict_fused.attend.default(*given.values())
    for own, sketch in zip(real, sketched, strict=True):
        assert (own.shape, own.dtype) == (sketch.shape, sketch.dtype)


def test_every_pair_of_bits() -> None:
    for of_keys, of_values in itertools.product(BITS, BITS):
        require_equal(*make(Sizes(group=3), ((PerChannel(of_keys), PerToken(of_values)),)))
