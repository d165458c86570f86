"""What a scorer hands back is written as it was handed back, whatever storage it shares."""

from typing import Any, ClassVar

import attrs
import pytest
import torch
from tests.oracle import prompts, tiny
from torch import Tensor

import qevict
from qevict import policies
from qevict.contracts.scorer import IMPORTANCE, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.errors import ContractError


@attrs.frozen
class Latest(Scorer):
    """The masses of the latest forward, and of the one before, which are handed on under another name."""

    name: ClassVar[str] = "latest"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS})
    seen: list[Any] = attrs.field(factory=list, eq=False)

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        return {name: torch.zeros(lanes, windows, device=device) for name in ("now", "before")}

    def update(self, state: State, observation: Observation) -> State:
        assert observation.mass is not None
        self.seen.append((state["now"].clone(), state["before"].clone()))
        return {"now": observation.mass.mean(dim=1), "before": state["now"]}

    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        return {IMPORTANCE: state["now"]}


def generated(scorer: Scorer) -> None:
    with qevict.attach(tiny(), attrs.evolve(policies.qevict("40 %"), scorer=scorer)) as session:
        ids = prompts(90)[0]
        session.generate(ids[:, -1:], cache=session.prefill(ids), max_new_tokens=5, do_sample=False)


def test_a_column_may_be_handed_on_under_another_name() -> None:
    scorer = Latest()
    generated(scorer)
    *_, (older, _), (now, before) = scorer.seen
    assert torch.equal(before, older)
    assert not torch.equal(now, before)


class Narrow(Scorer):
    """Keeps four numbers of a window, and hands back one."""

    name: ClassVar[str] = "narrow"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS})

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        return {"now": torch.zeros(lanes, windows, 4, device=device)}

    def update(self, state: State, observation: Observation) -> State:
        return {"now": state["now"][..., :1] + 1}

    def rank(self, state: State, windows: Windows) -> dict[str, Tensor]:
        return {IMPORTANCE: state["now"][..., 0]}


def test_a_state_of_another_shape_is_refused() -> None:
    with pytest.raises(ContractError, match=r"shaped \(1, \d+, 4\); its state 'now' is .*, 1\)"):
        generated(Narrow())
