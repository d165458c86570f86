"""CriticalKV's two rankings."""

import attrs
import pytest
import torch
from torch import Tensor

from qevict.contracts.output import OutputProjection
from qevict.contracts.values import Observation
from qevict.errors import PolicyError
from qevict.scorers.cumulative import CumulativeAttention
from qevict.testing import ScorerContract
from qevict_baselines.criticalkv import ATTENTION, OutputNorms
from qevict_baselines.keydiff import KeyDiff
from qevict_baselines.snapkv import ObservationWindow
from tests.baselines import worked
from tests.baselines.shown import close, prefix, ranked, windows
from tests.baselines.slow import criticalkv


class TestOutputNorms(ScorerContract):
    examples = 8
    part = OutputNorms()


class TestOutputNormsOfCumulativeAttention(ScorerContract):
    examples = 8
    part = OutputNorms(CumulativeAttention(prompt_stride=2, observe_tokens=3))


@attrs.frozen(eq=False)
class Told(OutputProjection):
    """Says what the norms are."""

    told: Tensor = attrs.field(kw_only=True)

    def norms(self, values: Tensor) -> Tensor:
        return self.told


def toy(norms: OutputProjection, values: Tensor) -> Observation:
    masses = prefix(worked.ATTENTION, worked.KV_HEADS, worked.WINDOW).sum(dim=2)
    columns = torch.arange(worked.LENGTH).expand(worked.KV_HEADS, -1)
    return Observation(columns, worked.LENGTH, mass=masses, values=values, ends_prompt=True, output=norms)


def test_the_worked_example() -> None:
    """Algorithms notes, section 6; norms are said by query head, a third above and below their mean."""
    mean = torch.tensor(worked.NORMS)[:, None, None]
    said = Told(torch.zeros(4, 1, 1), 2, told=torch.cat((mean * 2 / 3, mean * 4 / 3), dim=2))
    seen = toy(said, torch.zeros(2, 1, 8, 1))
    scorer = OutputNorms(ObservationWindow(prompt_queries=2, kernel=3), epsilon=0.0)
    rectangle = windows(2, worked.LENGTH, candidates=6)
    close(ranked(scorer, [seen], rectangle, ATTENTION)[:, :6], worked.SNAPKV_AVERAGE, 6e-5)
    close(ranked(scorer, [seen], rectangle)[:, :6], worked.CRITICAL_WEIGHTED, 1e-4)
    assert [
        row.topk(1).indices.tolist() for row in ranked(scorer, [seen], rectangle, ATTENTION)
    ] == worked.CRITICAL_FIRST


def test_norms_are_those_through_each_query_heads_slice() -> None:
    """Two KV heads of three query heads each; a little attention everywhere."""
    draw = torch.Generator().manual_seed(3)
    values, projection = torch.randn(2, 1, 8, 5, generator=draw), torch.randn(7, 6 * 5, generator=draw)
    seen = toy(OutputProjection(projection.T.unflatten(0, (6, 5)).contiguous(), 2), values)
    base = ObservationWindow(prompt_queries=2, kernel=3)
    attention = ranked(base, [seen], windows(2, 8))
    norms = torch.tensor(criticalkv.projected_norms(values[:, 0].tolist(), projection.tolist()))
    close(ranked(OutputNorms(base), [seen], windows(2, 8)), (attention + 1e-4) * norms, 1e-5)


def test_it_looks_where_its_base_looks() -> None:
    scorer = OutputNorms(CumulativeAttention(prompt_queries=7, prompt_stride=3, observe_tokens=2))
    assert (scorer.prompt_queries, scorer.prompt_stride, scorer.observe_tokens) == (7, 3, 2)
    assert OutputNorms().prompt_queries == 32


def test_a_base_of_something_else_is_refused() -> None:
    with pytest.raises(PolicyError, match="shows its base no held, rotary, which 'keydiff' needs"):
        OutputNorms(KeyDiff())
