"""The laws of an attention backend."""

from typing import ClassVar

import attrs
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from qevict.contracts.backend import Attended, AttentionBackend
from qevict.contracts.values import Need
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.testing.answers import Answer, plainly_attended
from qevict.testing.contract import Capability, RegisteredContract, law, plain_law
from qevict.testing.laying import Placed, lay_out
from qevict.testing.operators import Operators
from qevict.testing.scenes import BackendCase, Codecs, Scene, make_scene
from qevict.testing.values import Finding, close, copied, gap, moved, require, same_values

LONG_WINDOWS = 128
"""Windows of the prompt over which no L x L matrix may be held."""

MANY_QUERIES = 140
"""Queries of a forward that is longer than the block in which a backend may take them."""

TELLS_MASS = Capability(
    lambda part: isinstance(part, AttentionBackend) and Need.MASS in part.provides, "does not provide Need.MASS"
)


class BackendContract(RegisteredContract[AttentionBackend, BackendCase]):
    """The laws of an attention backend. One line makes them tests of yours.

    A backend that does not provide ``Need.MASS`` is not asked for masses.

    Attributes:
        codecs: quantizers of keys and of values, a pair for each encoded segment.
        window_tokens: tokens of a window.
        head_dim: channels of a key.

    Example:
        ```python
        from qevict.backends.reference import ReferenceAttention
        from qevict.testing import BackendContract


        class TestReferenceAttention(BackendContract):
            part = ReferenceAttention()
        ```
    """

    kind: ClassVar[type] = AttentionBackend
    examples: ClassVar[int] = 10
    codecs: ClassVar[Codecs] = ((PerChannel(2), PerToken(2)), (PerChannel(8, torch.float32), PerToken(4)))
    window_tokens: ClassVar[int] = 4
    head_dim: ClassVar[int] = 16

    def cases(self) -> SearchStrategy[BackendCase]:
        """Ragged lanes with gaps, an open window, pads, and any mixture of segments; logits as models want them."""
        return st.builds(
            BackendCase,
            lanes=st.integers(1, 3),
            heads=st.integers(1, 2),
            group=st.integers(1, 2),
            queries=st.integers(1, 6),
            sinks=st.integers(0, 3),
            windows=st.integers(0, 5),
            dense=st.integers(0, 10),
            dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
            seed=st.integers(0, 1000),
            softcap=st.sampled_from([None, None, 3.0]),
            sink_logits=st.booleans(),
        )

    @plain_law("provides is the set of what a scorer may need of the backend.")
    def test_it_declares_what_it_provides(self) -> None:
        provided = self.part.provides
        sound = isinstance(provided, frozenset) and all(isinstance(each, Need) for each in provided)
        require(sound, f"provides is {provided!r}")

    @law("The output equals fp32 softmax attention over the decoded keys and values.")
    def test_the_output_is_that_of_plain_attention(self, case: BackendCase) -> None:
        """Within 1e-5 for fp32 and a few ulp for 16-bit dtypes; the log-sum-exp likewise."""
        self._require_plain_output(case)

    @law("Logits are capped before the softmax if the query says so.")
    def test_logits_are_capped(self, case: BackendCase) -> None:
        self._require_plain_output(attrs.evolve(case, softcap=3.0))

    @law("Sink logits take part in the softmax and carry no value.")
    def test_sink_logits_take_their_share(self, case: BackendCase) -> None:
        self._require_plain_output(attrs.evolve(case, sink_logits=True))

    @plain_law("Every query of a long forward is answered as those of a short one.")
    def test_every_query_of_a_long_forward_is_answered(self) -> None:
        windows = -(-MANY_QUERIES // self.window_tokens)
        for dtype in (torch.float32, torch.bfloat16):
            plain = BackendCase(2, 1, 2, MANY_QUERIES, sinks=2, windows=windows, dense=5, dtype=dtype, seed=0)
            for case in (plain, attrs.evolve(plain, softcap=3.0, sink_logits=True)):
                self._require_plain_output(case)
                if TELLS_MASS.held(self.part):
                    self._require_plain_masses(case)

    @law("Causal in true positions.")
    def test_what_comes_later_changes_nothing(self, case: BackendCase) -> None:
        """Other keys and values after the first query that is no pad leave its answer alone."""
        scene = self._scene(attrs.evolve(case, lanes=1))
        places = scene.query.positions[0]
        first = int((places < 0).sum())
        after = (
            scene.first(0) + torch.arange(scene.keys[0, :, :, 0].numel()).view(-1, scene.window_tokens) > places[first]
        )
        other = attrs.evolve(
            scene,
            keys=torch.where(after[..., None], -3 * scene.keys, scene.keys),
            values=torch.where(after[..., None], 5 - scene.values, scene.values),
        )
        dense = (attrs.evolve(each, case=attrs.evolve(scene.case, dense=10)) for each in (scene, other))
        one, two = (self._attend(each, self._laid_out(each)).output[0, :, :, first] for each in dense)
        require(
            close(one, two, 1e-6), f"later tokens changed what the query at {int(places[first])} gets: {gap(one, two)}"
        )

    @law("Splitting or ordering segments differently changes nothing beyond the tolerance.")
    def test_how_tokens_are_split_over_segments_changes_nothing(self, case: BackendCase) -> None:
        """Codes and dense blocks are mixed where both store the same numbers, which is in fp32."""
        shares = (case.dense, 10, 5, 0) if case.dtype == torch.float32 else (10, 10, 10, 10)
        scene = self._scene(attrs.evolve(case, dense=shares[0]))
        first = self._attend(scene, self._laid_out(scene))
        for seed, dense in enumerate(shares[1:], start=1):
            other = attrs.evolve(scene, case=attrs.evolve(case, dense=dense))
            again = self._attend(other, self._laid_out(other, seed))
            tolerance = 1e-5 if case.dtype == torch.float32 else 4 * torch.finfo(case.dtype).eps
            require(
                close(again.output, first.output, tolerance),
                f"output, split otherwise: {gap(again.output, first.output)}",
            )
            require(close(again.lse, first.lse), f"log-sum-exp, split otherwise: {gap(again.lse, first.lse)}")

    @law("Mass is the softmax probability of a window, summed over the queries.", given_that=TELLS_MASS)
    def test_masses_are_those_of_plain_attention(self, case: BackendCase) -> None:
        self._require_plain_masses(case)

    @law("Mass of all windows and protected_mass add up to the number of (non-pad) queries.", given_that=TELLS_MASS)
    def test_masses_add_up_to_the_number_of_queries(self, case: BackendCase) -> None:
        """What sink logits take, ``exp(sink logit - log-sum-exp)``, is missing."""
        scene = self._scene(case)
        got = self._attend(scene, self._laid_out(scene), want_mass=True)
        mass, protected = _masses(got)
        total = mass.sum(-1) + protected
        real = scene.query.positions >= 0
        if scene.query.sink_logits is not None:
            taken = (scene.query.sink_logits[..., None] - got.lse).exp().masked_fill(~real[:, None, None], 0)
            total = total + taken.sum(3).flatten(1)
        asked = real.sum(1, keepdim=True).expand_as(total)
        require(close(total, asked), f"by lane and query head: {gap(total, asked)}")

    @law("mass alone equals the mass of attend; mass_by_query, summed, equals mass.", given_that=TELLS_MASS)
    def test_mass_alone_is_the_mass_of_attend(self, case: BackendCase) -> None:
        scene = self._scene(case)
        placed = self._laid_out(scene)
        mass, _ = _masses(self._attend(scene, placed, want_mass=True))
        alone = self.part.mass(*moved((scene.query, placed.view), self.device))
        require(close(alone, mass), f"mass by lane, query head and column: {gap(alone, mass)}")
        each = self.part.mass_by_query(*moved((scene.query, placed.view), self.device)).sum(2)
        require(close(each, alone), f"masses by query, summed, against mass: {gap(each, alone)}")

    @law("Masses are told to whoever wants them, and asking changes nothing.", given_that=TELLS_MASS)
    def test_asking_for_masses_changes_nothing(self, case: BackendCase) -> None:
        scene = self._scene(case)
        placed = self._laid_out(scene)
        silent, told = self._attend(scene, placed), self._attend(scene, placed, want_mass=True)
        require(silent.mass is None and silent.protected_mass is None, "masses are told that nobody asked for")
        require(close(silent.output, told.output), f"with masses, the output is {gap(told.output, silent.output)}")

    @plain_law("mass never holds an L x L matrix.", given_that=TELLS_MASS)
    def test_mass_never_holds_a_square_matrix(self) -> None:
        case = BackendCase(1, 1, 1, self.window_tokens * LONG_WINDOWS, 0, LONG_WINDOWS, 10, torch.float32, 0)
        scene = self._scene(case)
        query, view = moved((scene.query, self._laid_out(scene).view), self.device)
        with Operators() as operators:
            self.part.mass(query, view)
        tokens = view.windows.shape[1] * self.window_tokens
        finding = f"over {case.queries} queries and {tokens} tokens, a tensor has {operators.largest} elements"
        require(operators.largest < case.queries * tokens, finding)

    @law("Filler columns and unwritten tokens get a probability of exactly 0.")
    def test_filler_and_unwritten_tokens_are_not_seen(self, case: BackendCase) -> None:
        """What lies there may be anything."""
        scene, mass = self._scene(case), TELLS_MASS.held(self.part)
        loud_by = 1e6 if case.dtype != torch.float16 else 1e4
        quiet, loud = (self._laid_out(scene, filler=by) for by in (1.0, loud_by))
        one, two = self._attend(scene, quiet, want_mass=mass), self._attend(scene, loud, want_mass=mass)
        require(same_values(one.output, two.output), f"other filler, other output: {gap(one.output, two.output)}")
        require(same_values(one.lse, two.lse), f"other filler, other log-sum-exp: {gap(one.lse, two.lse)}")
        if mass:
            told = one.mass.masked_fill(~quiet.view.absent[:, None], 0) if one.mass is not None else torch.zeros(1)
            require((told == 0).all(), f"filler columns have masses of up to {float(told.abs().max()):.3g}")

    @law("Pads see nothing and give no mass.")
    def test_pads_see_nothing(self, case: BackendCase) -> None:
        """Whatever stands in a pad's query, and where there is nothing but pads."""
        scene, mass = self._scene(case), TELLS_MASS.held(self.part)
        nothing = attrs.evolve(scene.query, positions=torch.full_like(scene.query.positions, -1), padded=True)
        got = self._attend(attrs.evolve(scene, query=nothing), self._laid_out(scene), want_mass=mass)
        require((got.output == 0).all(), "queries that are pads get an output other than 0")
        require((got.lse == -torch.inf).all(), "queries that are pads have a log-sum-exp other than -inf")
        if mass:
            total = sum(float(each.abs().sum()) for each in _masses(got))
            require(total == 0, f"queries that are pads give a mass of {total}")

    @law("A frozen value: queries and views are left alone; equal input, equal output.")
    def test_it_changes_nothing_that_it_is_given(self, case: BackendCase) -> None:
        scene = self._scene(case)
        query, view = moved((scene.query, self._laid_out(scene).view), self.device)
        before = copied((query, view))
        mass = TELLS_MASS.held(self.part)
        first = copied(self.part.attend(query, view, want_mass=mass))
        require(same_values((query, view), before), "attending changed the query or the view")
        again = self.part.attend(query, view, want_mass=mass)
        require(close(again.output, first.output, 1e-6), f"asked again: {gap(again.output, first.output)}")

    @law("No host synchronisation: every step attends.")
    def test_the_host_never_waits(self, case: BackendCase) -> None:
        scene, mass = self._scene(case), TELLS_MASS.held(self.part)
        query, view = moved((scene.query, self._laid_out(scene).view), self.device)
        with Operators() as operators:
            self.part.attend(query, view, want_mass=mass)
            if mass:
                self.part.mass(query, view)
        require(not operators.waits, f"it waits for the device: {', '.join(sorted(operators.waits))}")

    def _scene(self, case: BackendCase) -> Scene:
        return make_scene(case, self.codecs, self.window_tokens, self.head_dim)

    def _require_plain_output(self, case: BackendCase) -> None:
        scene = self._scene(case)
        placed = self._laid_out(scene)
        got, wanted = self._attend(scene, placed), plainly_attended(scene, placed)
        require(got.output.dtype == case.dtype, f"queries in {case.dtype} are answered in {got.output.dtype}")
        require(got.lse.dtype == torch.float32, f"the log-sum-exp is {got.lse.dtype}")
        tolerance = 1e-5 if case.dtype == torch.float32 else 4 * torch.finfo(case.dtype).eps
        require(close(got.output, wanted.output, tolerance), f"output: {gap(got.output, wanted.output)}")
        require(close(got.lse, wanted.lse), f"log-sum-exp: {gap(got.lse, wanted.lse)}")

    def _require_plain_masses(self, case: BackendCase) -> None:
        scene = self._scene(case)
        placed = self._laid_out(scene)
        wanted = plainly_attended(scene, placed)
        got = self._attend(scene, placed, want_mass=True)
        mass, protected = _masses(got)
        told = _by_column(wanted, placed)
        require(mass.dtype == torch.float32, f"masses are {mass.dtype}")
        require(close(mass, told), f"mass by lane, query head and column: {gap(mass, told)}")
        require(close(protected, wanted.protected), f"protected mass: {gap(protected, wanted.protected)}")

    def _laid_out(self, scene: Scene, seed: int = 0, *, filler: float = 1.0) -> Placed:
        return lay_out(scene, scene.case.seed + seed, filler=filler)

    def _attend(self, scene: Scene, placed: Placed, *, want_mass: bool = False) -> Attended:
        query, view = moved((scene.query, placed.view), self.device)
        return moved(self.part.attend(query, view, want_mass=want_mass), torch.device("cpu"))


def _masses(got: Attended) -> tuple[Tensor, Tensor]:
    if got.mass is None or got.protected_mass is None:
        raise Finding("masses were asked for and not told")
    return got.mass, got.protected_mass


def _by_column(answer: Answer, placed: Placed) -> Tensor:
    """Masses by column, 0 for filler."""
    lanes, heads, _ = answer.mass.shape
    told = torch.zeros(lanes, heads, len(placed.blocks[0]), dtype=torch.float64)
    for lane, windows in enumerate(placed.blocks):
        for column, window in enumerate(windows):
            if window is not None:
                told[lane, :, column] = answer.mass[lane, :, window]
    return told
