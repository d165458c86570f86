"""C14: every preset on short prompts and tiny budgets. Something stays, the last token first of all."""

import math

import pytest
import torch
from transformers import DynamicCache

import qevict
from qevict.hf.compat import CACHE_ARGUMENT
from tests.baselines.zoo import FIRST, SAMPLED, kept_of, model_of, policy_of
from tests.oracle import prompts

LENGTHS = (1, 2, 3, 4, 5, 8, 12)
BUDGETS = (1e-6, 0.001, 0.05, 0.2, 0.999)
NOT_NESTED = {
    "ada_criticalkv": "its first stage takes half of a budget, by another ranking",
    "ada_qevict": "rounding a blend may give a head less of a larger budget",
    "adakv": "rounding a blend may give a head less of a larger budget",
    "critical_qevict": "its first stage takes half of a budget, by another ranking",
    "criticalkv": "its first stage takes half of a budget, by another ranking",
    "defensive_qevict": "how many windows are safe depends on the budget, and they are ranked apart",
    "defensivekv": "how many windows are safe depends on the budget, and they are ranked apart",
    "layer_defensivekv": "how many windows are safe depends on the budget, and they are ranked apart",
}
"""Methods that do not promise more of the same for a larger budget. All others go down one ranking of fixed scores."""


def small(name: str, budget: float) -> qevict.Policy:
    """Under a share of what a full cache holds, protecting no more than some of the prompts have."""
    return policy_of(name, qevict.Fraction(budget))


@pytest.mark.parametrize("name", SAMPLED)
@torch.no_grad()
def test_something_stays_of_every_prompt_under_every_budget(name: str) -> None:
    """All lengths in one batch, since rows are strangers."""
    model, (ids, mask) = model_of(), prompts(*LENGTHS)
    smaller: list[list[set[int]]] = []
    for budget in BUDGETS:
        with qevict.attach(model, small(name, budget)) as session:
            cache = session.prefill(ids, mask)
            kept = [[set(lane) for lane in layer] for layer in kept_of(cache)]
            out = session.generate(
                torch.full((len(LENGTHS), 1), FIRST),
                cache=cache,
                max_new_tokens=2,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        assert all(logits.isfinite().all() for logits in out.logits)
        for layer in kept:
            for lane, held in enumerate(layer):
                length = LENGTHS[lane // cache.wiring.lanes_per_row]
                assert held
                assert held <= {*range(length)}
                assert length - 1 in held or not cache.policy.keep_newest
        if smaller and name not in NOT_NESTED:
            for less, more in zip(smaller, kept, strict=True):
                assert all(own <= other for own, other in zip(less, more, strict=True))
        smaller = kept


@pytest.mark.parametrize("name", SAMPLED)
@torch.no_grad()
def test_a_prompt_within_what_is_protected_is_the_stock_cache_bit_for_bit(name: str) -> None:
    """What a policy leaves alone costs nothing, in the prompt and behind it."""
    model, policy = model_of(), small(name, 0.001)
    protected = policy.sink_tokens + policy.protected_tokens
    new = 1 if protected < 3 else 2
    ids, _ = prompts(max(1, protected - new))
    stock = DynamicCache(config=model.config)
    model.base_model(ids, **{CACHE_ARGUMENT: stock})
    with qevict.attach(model, policy) as session:
        cache = session.prefill(ids)
        token = torch.full((1, 1), FIRST)
        for _ in range(new):
            own = model(token, **{CACHE_ARGUMENT: cache}).logits
            theirs = model(token, **{CACHE_ARGUMENT: stock}).logits
            assert torch.equal(own, theirs)
            token = own[:, -1:].argmax(-1)


@pytest.mark.parametrize("name", ["pyramidkv", "pyramid_qevict"])
@pytest.mark.parametrize("budget", [0.3, 0.5])
def test_a_pyramid_keeps_no_more_than_its_budget_has(name: str, budget: float) -> None:
    """Over four layers, shares falling from the first to the last."""
    ids, _ = prompts(120)
    with qevict.attach(model_of(num_hidden_layers=4), small(name, budget)) as session:
        cache = session.prefill(ids)
    assert cache.report().overshoot_bytes == 0
    held = [sum(map(len, layer)) / len(layer) for layer in kept_of(cache)]
    assert held == sorted(held, reverse=True)
    assert held[0] > held[-1]
    if name == "pyramidkv":  # codes are more windows than full precision has room for
        assert sum(held) <= math.ceil(budget * 120 * 4)


def test_a_policy_that_protects_nothing_keeps_one_window_of_each_lane() -> None:
    """The hottest tier has room for it, whatever the budget says."""
    ids, mask = prompts(3, 12)
    with qevict.attach(model_of(), small("tova", 1e-6)) as session:
        assert [len(lane) for lane in session.prefill(ids, mask).kept_positions(0)] == [1, 1]
