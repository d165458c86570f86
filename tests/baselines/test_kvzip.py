"""KVzip's scorer: the laws, the highest attention, and what it refuses."""

import pytest
import torch

from qevict.contracts.scorer import Repeats
from qevict.contracts.values import Observation
from qevict.errors import PolicyError
from qevict.testing import ScorerContract
from qevict_baselines.kvzip import Reconstruction, kvzip
from tests.baselines.shown import close, ranked, windows


class TestReconstruction(ScorerContract):
    part = Reconstruction()
    examples = 8


def repeated(highest: torch.Tensor) -> Observation:
    nowhere = torch.full((highest.shape[0], 1), -1)
    return Observation(nowhere, windows=highest.shape[3], reconstruction=highest)


def test_the_highest_of_a_group_and_of_all_pieces_counts_and_heads_are_averaged() -> None:
    first = torch.tensor([[[[0.1, 0.7, 0.0], [0.5, 0.2, 0.0]], [[0.3, 0.1, 0.0], [0.1, 0.9, 0.0]]]])
    second = torch.tensor([[[[0.0, 0.0, 0.4], [0.0, 0.0, 0.2]], [[0.0, 0.0, 0.8], [0.0, 0.0, 0.1]]]])
    found = ranked(Reconstruction(), [repeated(first), repeated(second)], windows(1, 3))
    close(found, [[0.4, 0.8, 0.6]])


def test_a_scorer_says_how_the_prompt_is_repeated() -> None:
    assert kvzip("20 %", instruction=(7,), repeat_tokens=512).scorer.repeats == Repeats(512, (7,), 8)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "options", [{"instruction": ("Repeat",)}, {"instruction": (-1,)}, {"tokens": 0}, {"lead_tokens": -1}]
)
def test_what_is_no_repetition_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(PolicyError, match=next(iter(options))):
        Repeats(**options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchecked")
def test_a_repetition_is_one() -> None:
    with pytest.raises(PolicyError, match=r"Repeats\(tokens=2048"):
        Reconstruction(repeats=512)  # type: ignore[arg-type]
