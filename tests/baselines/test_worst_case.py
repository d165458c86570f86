"""DefensiveKV's risk."""

import attrs
import torch
from torch import Tensor

from qevict.contracts.output import OutputProjection
from qevict.contracts.values import Observation
from qevict.testing import ScorerContract
from qevict_baselines.criticalkv import ATTENTION
from qevict_baselines.defensivekv import WorstCase
from tests.baselines import worked
from tests.baselines.shown import close, prefix, ranked, windows
from tests.baselines.slow import defensivekv
from tests.baselines.slow.basics import group_mean, over_queries
from tests.baselines.test_output_norms import Told


class TestWorstCase(ScorerContract):
    examples = 8
    part = WorstCase()


class TestWorstCaseOfFewQueries(ScorerContract):
    examples = 8
    part = WorstCase(prompt_queries=2, kernel=3)


def shown(masses: Tensor, norms: Tensor, asked: Tensor) -> Observation:
    """One row of lanes of one KV head; ``norms[kv_head][token]``."""
    lanes, tokens = norms.shape
    positions = torch.arange(tokens).expand(lanes, -1)
    said = Told(torch.zeros(2 * lanes, 1, 1), lanes, told=norms[:, None, None].expand(-1, 1, 2, -1))
    return Observation(
        positions,
        tokens,
        mass_by_query=masses,
        asked=asked,
        positions=positions,
        values=torch.zeros(lanes, 1, tokens, 1),
        output=said,
        ends_prompt=True,
        lanes_per_row=lanes,
    )


ASKED = torch.tensor([[6, 7]] * 2)
RECTANGLE = windows(2, worked.LENGTH, candidates=6)


def toy() -> Observation:
    """The worked example; what the observation window gets, however much, leaks nowhere."""
    masses = prefix(worked.ATTENTION, worked.KV_HEADS, worked.WINDOW) + torch.tensor([0.0] * 6 + [0.1] * 2)
    return shown(masses, torch.tensor(worked.NORMS), ASKED)


def test_the_worked_example() -> None:
    """Algorithms notes, section 7."""
    scorer = WorstCase(prompt_queries=2, kernel=3)
    close(ranked(scorer, [toy()], RECTANGLE)[:, :6], worked.DEFENSIVE_WEIGHTED, 1e-4)
    mean = group_mean(over_queries(worked.ATTENTION), 2)
    close(ranked(scorer, [toy()], RECTANGLE, ATTENTION)[:, :6], mean)


def test_each_step_of_the_worked_example() -> None:
    """Worst cases, the shares of norms, and the risks, which equal shares leave alone."""
    scorer = WorstCase(prompt_queries=2, kernel=3)
    state = scorer.update(scorer.start(2, 8, torch.device("cpu")), toy())
    close(state["risk"][:, :6], worked.DEFENSIVE_WORST, 6e-5)
    close(state["share"][:, :6], worked.DEFENSIVE_SHARES, 6e-5)
    close(
        scorer.rank({**state, "share": torch.ones(2, 8)}, RECTANGLE)["importance"][:, :6], worked.DEFENSIVE_RISKS, 6e-5
    )


def test_it_is_the_slow_one() -> None:
    draw = torch.Generator().manual_seed(5)
    attention, norms = torch.rand(6, 4, 9, generator=draw) / 9, torch.rand(3, 13, generator=draw) + 0.1
    masses = torch.nn.functional.pad(attention.unflatten(0, (3, 2)), (0, 4))
    found = ranked(
        WorstCase(prompt_queries=4),
        [shown(masses, norms, torch.arange(9, 13).expand(3, -1))],
        windows(3, 13, candidates=9),
    )
    wanted = torch.tensor(defensivekv.risks(attention.tolist(), 3, 5)) * torch.tensor(
        defensivekv.shares(norms[:, :9].tolist())
    )
    close(found[:, :9], wanted, 1e-5)


def test_a_lane_of_several_heads_takes_the_highest_risk_and_share() -> None:
    """The toy's two KV heads in one lane."""
    apart = toy()
    assert apart.mass_by_query is not None
    assert isinstance(apart.output, Told)
    together = attrs.evolve(
        apart,
        columns=apart.columns[:1],
        mass_by_query=apart.mass_by_query.flatten(0, 1)[None],
        asked=ASKED[:1],
        positions=RECTANGLE.positions[:1],
        values=torch.zeros(1, 2, 8, 1),
        output=Told(torch.zeros(4, 1, 1), 2, told=apart.output.told.flatten(0, 1)[None]),
        lanes_per_row=1,
    )
    scorer = WorstCase(prompt_queries=2, kernel=3)
    state = scorer.update(scorer.start(1, 8, torch.device("cpu")), together)
    close(state["risk"][0, :6], torch.tensor(worked.DEFENSIVE_WORST).amax(dim=0), 6e-5)
    close(state["share"][0, :6], torch.tensor(worked.DEFENSIVE_SHARES).amax(dim=0), 6e-5)


def test_what_is_decoded_later_has_the_mean_risk() -> None:
    """A new value's share counts, its risk is that of the rest."""
    scorer = WorstCase(prompt_queries=2, kernel=3)
    later = Observation(
        torch.tensor([[8], [8]]),
        9,
        values=torch.zeros(2, 1, 1, 1),
        output=Told(torch.zeros(4, 1, 1), 2, told=torch.tensor([3.0, 1.0])[:, None, None, None].expand(-1, 1, 2, -1)),
        positions=torch.arange(9).expand(2, -1),
        lanes_per_row=2,
    )
    state = {name: torch.nn.functional.pad(each, (0, 1)) for name, each in _after_prompt(scorer).items()}
    found = scorer.rank(scorer.update(state, later), windows(2, 9))["importance"]
    prior = state["risk"].mean(dim=1)
    close(found[:, 8], prior * torch.tensor([0.75, 0.25]))


def _after_prompt(scorer: WorstCase) -> dict[str, Tensor]:
    return dict(scorer.update(scorer.start(2, 8, torch.device("cpu")), toy()))


def test_a_token_whose_values_write_nothing_has_no_share() -> None:
    silent = attrs.evolve(toy(), output=OutputProjection(torch.zeros(4, 1, 3), 2))
    assert ranked(WorstCase(prompt_queries=2, kernel=3), [silent], RECTANGLE).eq(0).all()
