"""Two rankings that split what is kept."""

import pytest
import torch
from torch import Tensor

from qevict.contracts.rotary import Rotary
from qevict.contracts.values import Observation
from qevict.errors import PolicyError
from qevict.scorers.cumulative import CumulativeAttention
from qevict.testing import ScorerContract
from qevict_baselines.handover import Handover
from qevict_baselines.keydiff import KeyDiff
from tests.baselines.shown import close, kept, looked, ranked, windows

ROTARY = Rotary(torch.tensor([1.0, 0.2]))


class TestHandover(ScorerContract):
    examples = 8
    part = Handover(share=0.5)


class TestHandoverToFewLooks(ScorerContract):
    examples = 8
    part = Handover(share=0.25, domain="rotated", prompt_queries=3, prompt_stride=2, observe_tokens=2)


def prompt(count: int, lanes: int = 2) -> Observation:
    draw = torch.Generator().manual_seed(count)
    keys, mass = torch.randn(lanes, 1, count, 4, generator=draw), torch.rand(lanes, 2, count, generator=draw)
    return looked(mass, ends_prompt=True, held=kept(keys), rotary=ROTARY)


def best(scores: Tensor, count: int) -> set[int]:
    return set(scores.topk(count).indices.tolist())


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("slots", [1, 4, 10, 20])
def test_each_ranking_fills_its_part_of_any_budget(share: float, slots: int) -> None:
    seen, rectangle = [prompt(24)], windows(2, 24)
    found = ranked(Handover(share=share), seen, rectangle)
    diverse = ranked(KeyDiff("pre_rope"), seen, rectangle)
    attended = ranked(CumulativeAttention(), seen, rectangle)
    for lane in range(2):
        held = best(found[lane], slots)
        assert best(diverse[lane], int(share * slots)) <= held
        assert best(attended[lane], int((1 - share) * slots)) <= held
        assert held <= best(diverse[lane], slots) | best(attended[lane], slots)


def test_places_by_hand() -> None:
    """By attention 0 1 2 3, by difference of keys 3 2 1 0: the better place, doubled, is the score."""
    angles = torch.tensor([0.0, 0.1, 0.5, 1.5])
    keys = torch.stack((angles.cos(), torch.zeros(4), angles.sin(), torch.zeros(4)), dim=1)[None, None]
    mass = torch.tensor([[[0.4, 0.3, 0.2, 0.1]]])
    seen = looked(mass, ends_prompt=True, held=kept(keys), rotary=ROTARY)
    assert ranked(KeyDiff(), [seen], windows(1, 4))[0].argsort(descending=True).tolist() == [3, 0, 1, 2]
    close(ranked(Handover(share=0.5, domain="rotated"), [seen], windows(1, 4)), [[-2.0, -4.0, -6.0, -2.0]])


def test_places_are_among_candidates_and_equals_go_by_position() -> None:
    mass = torch.full((1, 1, 4), 0.25)
    found = ranked(Handover(share=0.5), [looked(mass)], windows(1, 4, candidates=3))
    close(found[0, :3], [-2.0, -4.0, -6.0])


def test_what_is_decoded_later_lives_by_attention_alone() -> None:
    """The fifth window is behind all others by its keys, and before them by its masses."""
    scorer = Handover(share=0.5)
    state = scorer.update(scorer.start(2, 4, torch.device("cpu")), prompt(4))
    fresh = scorer.start(2, 1, torch.device("cpu"))
    grown = {name: torch.cat((array, fresh[name]), dim=1) for name, array in state.items()}
    later = scorer.update(grown, looked(torch.tensor([[[0.0, 0.0, 0.0, 0.0, 9.0]]] * 2)))
    close(scorer.rank(later, windows(2, 5))["importance"][:, 4], [-2.0, -2.0])
    close(scorer.rank(grown, windows(2, 5))["importance"][:, 4], [-10.0, -10.0])


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_both_have_a_part(share: float) -> None:
    with pytest.raises(PolicyError, match="share is the part of what is kept that key diversity chooses"):
        Handover(share=share)
