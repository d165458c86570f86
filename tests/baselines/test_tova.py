"""TOVA's last query."""

import torch

from qevict.testing import ScorerContract
from qevict_baselines.tova import LastQuery
from tests.baselines import worked
from tests.baselines.shown import close, looked, ranked, windows
from tests.baselines.slow import tova


class TestLastQuery(ScorerContract):
    examples = 8
    part = LastQuery()


def test_the_worked_example() -> None:
    """Algorithms notes, section 11: the newest token competes, and is the first to go."""
    found = ranked(LastQuery(), [looked(torch.tensor([worked.TOVA_ROWS]), ends_prompt=True)], windows(1, 8))
    close(found[0], worked.TOVA_SCORES)
    assert sorted(found[0].topk(4).indices.tolist()) == worked.TOVA_KEPT_4
    assert sorted(found[0].topk(7).indices.tolist()) == worked.TOVA_KEPT_7


def test_a_query_replaces_what_the_one_before_saw() -> None:
    rows = torch.rand(3, 2, 4, 9, generator=torch.Generator().manual_seed(0))
    prompt, *decoded = (
        looked(row, first=None if number == 0 else torch.ones(2).bool()) for number, row in enumerate(rows)
    )
    found = ranked(LastQuery(), [prompt, *decoded], windows(2, 9))
    close(found, [tova.scores(row) for row in rows[-1].tolist()])
