"""Each law of backends is broken by some backend, and the kit says so."""

from typing import ClassVar

import attrs
import pytest
import torch
from tests.breaking import Break, breaks, laws_of, passes, report
from torch import Tensor

from qevict.backends.reference import ReferenceAttention, gather
from qevict.contracts.backend import Attended, Query, View
from qevict.contracts.quantizer import NOTHING_SHARED, Quantizer
from qevict.contracts.values import Codes, Layout, Need
from qevict.testing import BackendContract


@attrs.frozen
class Changed(ReferenceAttention):
    """The reference, asked something else or quoted wrongly."""

    def attend(self, query: Query, view: View, *, want_mass: bool) -> Attended:
        asked = self.asked(query, view)
        return self.told(super().attend(*asked, want_mass=want_mass), query, view)

    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        return query, view

    def told(self, seen: Attended, query: Query, view: View) -> Attended:
        return seen


@attrs.frozen
class SeesTheFuture(Changed):
    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        return attrs.evolve(query, positions=torch.where(query.positions < 0, -1, query.positions + 1)), view


@attrs.frozen
class SharpensAttention(Changed):
    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        return attrs.evolve(query, scaling=query.scaling * 1.01), view


@attrs.frozen
class ChoosesItsScaling(Changed):
    """What most models ask for, and some do not."""

    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        return attrs.evolve(query, scaling=query.vectors.shape[-1] ** -0.5), view


@attrs.frozen
class ForgetsTheSoftcap(Changed):
    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        return attrs.evolve(query, softcap=None), view


@attrs.frozen
class CapsWhatItScales(Changed):
    """Caps before the scaling, as if the cap were one of dot products."""

    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        cap = query.softcap
        return attrs.evolve(query, softcap=None if cap is None else cap / query.scaling), view


@attrs.frozen
class ForgetsTheSinkLogits(Changed):
    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        return attrs.evolve(query, sink_logits=None), view


@attrs.frozen
class ScalesTheSinkLogits(Changed):
    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        sinks = query.sink_logits
        return attrs.evolve(query, sink_logits=None if sinks is None else sinks * query.scaling), view


@attrs.frozen
class CountsSinkLogitsAsSinks(Changed):
    """Calls protected what the sink logits take."""

    def told(self, seen: Attended, query: Query, view: View) -> Attended:
        if seen.protected_mass is None or query.sink_logits is None:
            return seen
        taken = (query.sink_logits[..., None] - seen.lse).exp().masked_fill(query.positions[:, None, None] < 0, 0)
        return attrs.evolve(seen, protected_mass=seen.protected_mass + taken.sum(3).flatten(1))


@attrs.frozen
class ShowsPadsTheSinkLogits(Changed):
    def told(self, seen: Attended, query: Query, view: View) -> Attended:
        if query.sink_logits is None:
            return seen
        pads = query.positions[:, None, None] < 0
        return attrs.evolve(seen, lse=torch.where(pads, query.sink_logits[..., None], seen.lse))


@attrs.frozen
class AnswersOneBlock(Changed):
    """Leaves queries from number 128 on unanswered."""

    def told(self, seen: Attended, query: Query, view: View) -> Attended:
        output = seen.output.clone()
        output[:, :, :, 128:] = 0
        return attrs.evolve(seen, output=output)


@attrs.frozen
class MassOfOneBlock(Changed):
    def told(self, seen: Attended, query: Query, view: View) -> Attended:
        if seen.mass is None:
            return seen
        first = attrs.evolve(query, vectors=query.vectors[:, :, :, :128], positions=query.positions[:, :128])
        return attrs.evolve(seen, mass=self.mass(first, view))


@attrs.frozen
class Rounded(Quantizer):
    """Another quantizer, whose windows are decoded to the dtype of the model."""

    inner: Quantizer
    dtype: torch.dtype
    name: ClassVar[str] = "rounded"

    @property
    def bits(self) -> int:
        return self.inner.bits

    @property
    def min_snr_db(self) -> float:
        return self.inner.min_snr_db

    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        return self.inner.layout(window_tokens, head_dim)

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        return self.inner.encode(x)

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        return self.inner.decode(codes, head_dim).to(self.dtype).float()


@attrs.frozen
class DecodesToTheModelsDtype(Changed):
    """Right for models in fp32, and where nothing is encoded."""

    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        dtype = query.vectors.dtype
        encoded = tuple(attrs.evolve(each, keys=Rounded(each.keys, dtype)) for each in view.encoded)
        return query, attrs.evolve(view, encoded=encoded)


@attrs.frozen
class AnswersInDouble(Changed):
    def told(self, seen: Attended, query: Query, view: View) -> Attended:
        return attrs.evolve(seen, output=seen.output.double())


@attrs.frozen
class ForgetsTheSecondSegment(Changed):
    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        present = ~view.absent
        present[:, view.slots.shape[1] + view.encoded[0].slots.shape[1] :] = False
        return query, attrs.evolve(view, present=present)


@attrs.frozen
class IgnoresTheOffset(Changed):
    """Turns decoded keys by the true position: right as long as everything is dense."""

    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        return query, attrs.evolve(view, rotary_offset=torch.zeros_like(view.rotary_offset))


@attrs.frozen
class LosesMass(Changed):
    def told(self, seen: Attended, query: Query, view: View) -> Attended:
        return attrs.evolve(seen, mass=None if seen.mass is None else seen.mass * 0.9)


@attrs.frozen
class MassPerQuery(Changed):
    def mass(self, query: Query, view: View) -> Tensor:
        return super().mass(query, view) / query.vectors.shape[3]


@attrs.frozen
class AlwaysTells(Changed):
    def attend(self, query: Query, view: View, *, want_mass: bool) -> Attended:
        return super().attend(query, view, want_mass=True)


@attrs.frozen
class HoldsTheMatrix(Changed):
    def mass(self, query: Query, view: View) -> Tensor:
        keys = gather(view).keys
        (query.vectors.float().flatten(2, 3) @ keys.transpose(-1, -2)).softmax(-1)
        return super().mass(query, view)


@attrs.frozen
class SeesFiller(Changed):
    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        return query, attrs.evolve(view, present=None, hidden=torch.zeros_like(view.hidden))


@attrs.frozen
class SeesUnwrittenTokens(Changed):
    """Tokens of an open window that the lane has not reached."""

    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        ahead = torch.where(query.positions < 0, -1, query.positions + 3)
        return attrs.evolve(query, positions=ahead), attrs.evolve(view, lengths=view.lengths + 3)


@attrs.frozen
class GivesFillerMass(Changed):
    def told(self, seen: Attended, query: Query, view: View) -> Attended:
        return attrs.evolve(seen, mass=None if seen.mass is None else seen.mass + 1e-9)


@attrs.frozen
class PadsSeeTheSinks(Changed):
    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        return attrs.evolve(query, positions=query.positions.clamp(min=0)), view


@attrs.frozen
class ScalesItsQueries(Changed):
    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        return attrs.evolve(query, vectors=query.vectors.mul_(query.scaling), scaling=1.0), view


@attrs.frozen
class Synchronises(Changed):
    def asked(self, query: Query, view: View) -> tuple[Query, View]:
        longest = int(view.lengths.max())
        return query, attrs.evolve(view, lengths=view.lengths.clamp(max=longest))


@attrs.frozen
class Boasts(ReferenceAttention):
    provides: ClassVar[frozenset[Need]] = frozenset({"everything"})  # type: ignore[arg-type]


BREAKS = (
    Break("test_it_declares_what_it_provides", Boasts(), "provides is frozenset({'everything'})"),
    Break("test_the_output_is_that_of_plain_attention", SharpensAttention(), "found: "),
    Break("test_the_output_is_that_of_plain_attention", ChoosesItsScaling(), "output: "),
    Break("test_the_output_is_that_of_plain_attention", AnswersInDouble(), "are answered in torch.float64"),
    Break("test_the_output_is_that_of_plain_attention", ForgetsTheSecondSegment(), "output: "),
    Break("test_logits_are_capped", ForgetsTheSoftcap(), "output: "),
    Break("test_logits_are_capped", CapsWhatItScales(), "output: "),
    Break("test_sink_logits_take_their_share", ForgetsTheSinkLogits(), "output: "),
    Break("test_sink_logits_take_their_share", ScalesTheSinkLogits(), "output: "),
    Break("test_every_query_of_a_long_forward_is_answered", AnswersOneBlock(), "output: 0 against"),
    Break("test_every_query_of_a_long_forward_is_answered", MassOfOneBlock(), "mass by lane"),
    Break("test_what_comes_later_changes_nothing", SeesTheFuture(), "law: Causal in true positions."),
    Break("test_how_tokens_are_split_over_segments_changes_nothing", IgnoresTheOffset(), "split otherwise"),
    Break("test_masses_are_those_of_plain_attention", SharpensAttention(), "mass"),
    Break("test_masses_are_those_of_plain_attention", DecodesToTheModelsDtype(), "dtype=torch.bfloat16"),
    Break("test_masses_add_up_to_the_number_of_queries", LosesMass(), "by lane and query head"),
    Break("test_masses_add_up_to_the_number_of_queries", CountsSinkLogitsAsSinks(), "sink_logits=True"),
    Break("test_mass_alone_is_the_mass_of_attend", MassPerQuery(), "mass by lane"),
    Break("test_asking_for_masses_changes_nothing", AlwaysTells(), "nobody asked for"),
    Break("test_mass_never_holds_a_square_matrix", HoldsTheMatrix(), "over 512 queries and "),
    Break("test_filler_and_unwritten_tokens_are_not_seen", SeesFiller(), "filler"),
    Break("test_filler_and_unwritten_tokens_are_not_seen", SeesUnwrittenTokens(), "other filler, other output"),
    Break("test_filler_and_unwritten_tokens_are_not_seen", GivesFillerMass(), "filler columns have masses"),
    Break("test_pads_see_nothing", PadsSeeTheSinks(), "queries that are pads"),
    Break("test_pads_see_nothing", ShowsPadsTheSinkLogits(), "log-sum-exp other than -inf"),
    Break("test_it_changes_nothing_that_it_is_given", ScalesItsQueries(), "attending changed the query"),
    Break("test_the_host_never_waits", Synchronises(), "_local_scalar_dense"),
)


@breaks(*BREAKS)
def test_a_broken_backend_is_told_which_law_it_breaks(broken: Break) -> None:
    report(BackendContract, broken)


def test_every_law_is_broken_by_some_backend() -> None:
    assert {each.law for each in BREAKS} == laws_of(BackendContract)


@attrs.frozen
class TellsNoMass(ReferenceAttention):
    provides: ClassVar[frozenset[Need]] = frozenset({Need.KEYS, Need.VALUES})

    def attend(self, query: Query, view: View, *, want_mass: bool) -> Attended:
        if want_mass:
            raise NotImplementedError
        return super().attend(query, view, want_mass=False)

    def mass(self, query: Query, view: View) -> Tensor:
        raise NotImplementedError


MASS_LAWS = {law for law in laws_of(BackendContract) if "mass" in law}


@pytest.mark.parametrize("law", sorted(MASS_LAWS))
def test_who_provides_no_mass_is_not_asked_for_it(law: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"TellsNoMass\(\) does not provide Need.MASS"):
        passes(BackendContract, TellsNoMass(), law)


def test_the_other_laws_hold_without_masses() -> None:
    for law in sorted(laws_of(BackendContract) - MASS_LAWS):
        passes(BackendContract, TellsNoMass(), law)
