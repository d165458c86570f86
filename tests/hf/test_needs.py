"""What a policy needs of a model is checked when it is attached, with the reason and the remedy."""

from typing import Any

import attrs
import pytest
from tests.engine.test_observing import Spy, spying
from tests.oracle import prompts, tiny
from tests.ropes import EXACT, changing
from tests.wrapped import with_lora

import qevict
from qevict import policies
from qevict.contracts.values import Need
from qevict.errors import UnsupportedModelError
from qevict.policy import Policy

TURNS_KEYS = spying(Spy(needs=frozenset({Need.KEYS, Need.ROTARY})))
READS_OUTPUTS = spying(Spy(needs=frozenset({Need.VALUES, Need.OUTPUT_PROJECTION})))
AT_PLACES = attrs.evolve(policies.sinks_recent("50 %"), positions="cache_relative")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
def test_an_output_projection_inside_an_adapter_is_refused() -> None:
    """Its weights are not what the layer does; merged they are."""
    adapted = with_lora(tiny(num_hidden_layers=2))
    with (
        pytest.raises(UnsupportedModelError, match=r"o_proj.*merge adapters into the weights"),
        qevict.attach(adapted, READS_OUTPUTS),
    ):
        pass
    with qevict.attach(adapted, policies.evict_only("50 %")) as session:
        session.prefill(prompts(20)[0])
    with qevict.attach(adapted.merge_and_unload(), READS_OUTPUTS) as session:
        session.prefill(prompts(20)[0])


@pytest.mark.parametrize(
    ("policy", "why"),
    [(TURNS_KEYS, "scores by 'spy', which turns keys"), (AT_PLACES, "sees kept keys at their places in the cache")],
    ids=["scorer", "positions"],
)
class TestTablesOfRotation:
    """Keys are turned by a table that may not change with the length of a text."""

    @pytest.mark.parametrize("kind", changing(16))
    def test_one_that_changes_is_refused(self, policy: Policy, why: str, kind: str) -> None:
        model = tiny(num_hidden_layers=1, rope_parameters=rope(kind, changing(16)[kind]))
        with pytest.raises(UnsupportedModelError, match=f"{why}.*{kind}.*at original positions"):
            qevict.attach(model, policy).__enter__()
        with qevict.attach(model, policies.evict_only("50 %")) as session:
            session.prefill(prompts(20)[0])

    @pytest.mark.parametrize("kind", EXACT)
    def test_one_that_stays_is_served(self, policy: Policy, why: str, kind: str) -> None:
        model = tiny(num_hidden_layers=1, rope_parameters=rope(kind, EXACT[kind]))
        with qevict.attach(model, policy) as session:
            assert session.prefill(prompts(90)[0]).get_seq_length() == 90, why


def rope(kind: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0} | parameters
