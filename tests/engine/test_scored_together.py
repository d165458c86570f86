"""What single tokens show of all layers at once is what each layer would show alone."""

from typing import Any

import attrs
import pytest
import torch
from tests.engine.test_observing import Spy, spying
from tests.oracle import prompts, tiny

import qevict
from qevict import policies
from qevict.contracts.values import Need
from qevict.engine import engine, observing
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy
from qevict.scorers.cumulative import CumulativeAttention
from qevict_baselines.adakv import adakv
from qevict_baselines.pyramidkv import pyramidkv
from qevict_baselines.tova import tova

LAYERS, NEW = 3, 21

POLICIES = {
    "lanes alike": policies.qevict("40 %"),
    "lanes that differ": attrs.evolve(policies.qevict("40 %"), granularity="kv_head"),
    "heads with shares of their own": adakv("40 %"),
    "layers with budgets of their own": pyramidkv("40 %"),
    "the latest masses only": tova("40 %"),
    "the last tokens of a period": attrs.evolve(policies.qevict("40 %"), scorer=CumulativeAttention(observe_tokens=3)),
}


def decoded(policy: Policy, lengths: tuple[int, ...]) -> Any:
    """A cache behind a prompt and single tokens."""
    ids, mask = prompts(*lengths)
    model = tiny(num_hidden_layers=LAYERS)
    with qevict.attach(model, policy) as session, torch.no_grad():
        cache = session.prefill(ids, mask)
        for step in range(NEW):
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
            positions = mask.sum(1, keepdim=True) - 1
            new = {"attention_mask": mask, "position_ids": positions, CACHE_ARGUMENT: cache}
            model(ids[:, -1:] * 0 + 5 + step, **new)
    return cache


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score layer by layer."""
    for module in (engine, observing):
        monkeypatch.setattr(module, "shown_alone", lambda _needs, _forward: True)


@pytest.mark.parametrize("lengths", [(90,), (300, 90)], ids=["one row", "ragged rows"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_same_is_kept_and_remembered(
    policy: Policy, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = decoded(policy, lengths)
    alone(monkeypatch)
    each = decoded(policy, lengths)
    for index, (own, other) in enumerate(zip(together.engine.layers, each.engine.layers, strict=True)):
        assert together.kept_positions(index) == each.kept_positions(index)
        for name, column in own.records.state.items():
            torch.testing.assert_close(column, other.records.state[name])
        assert torch.equal(own.records.place, other.records.place)
    assert together.nbytes() == each.nbytes()


@pytest.mark.parametrize("granularity", ["row", "kv_head"])
def test_what_is_shown_lies_layer_by_layer(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns may lie elsewhere, and are told by where their windows begin."""
    needs = frozenset({Need.MASS, Need.KEYS, Need.VALUES, Need.POSITIONS, Need.FIRST_LOOKS, Need.ROTARY})
    spies = Spy(needs=needs), Spy(needs=needs)
    decoded(spying(spies[0], granularity=granularity), (40, 9))
    alone(monkeypatch)
    decoded(spying(spies[1], granularity=granularity), (40, 9))
    together, each = spies[0].seen[LAYERS:], spies[1].seen[LAYERS:]
    assert len(each) == LAYERS * len(together) == LAYERS * NEW
    for step, whole in enumerate(together):
        layers = each[step * LAYERS : (step + 1) * LAYERS]
        lanes = layers[0].columns.shape[0]
        assert whole.lanes_per_row == layers[0].lanes_per_row
        assert (whole.first is None) == (layers[0].first is None)
        for index, layer in enumerate(layers):
            own = slice(index * lanes, (index + 1) * lanes)
            assert torch.equal(whole.keys[own], layer.keys)
            assert torch.equal(whole.values[own], layer.values)
            assert whole.first is None or torch.equal(whole.first[own], layer.first)
            for lane in range(lanes):
                assert by_position(whole, own.start + lane) == by_position(layer, lane)


def by_position(observation: Any, lane: int) -> tuple[dict[int, list[float]], list[int]]:
    """Masses of a lane by where their windows begin; and where those of its new tokens do."""
    places = observation.positions[lane].tolist()
    masses = {at: observation.mass[lane, :, column].tolist() for column, at in enumerate(places) if at >= 0}
    filler = [column for column, at in enumerate(places) if at < 0]
    assert not observation.mass[lane][:, filler].any()
    return masses, [places[column] if column >= 0 else -1 for column in observation.columns[lane].tolist()]
