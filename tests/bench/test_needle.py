"""The needle bench: one reading serves all policies and changes nothing; SmolLM2's figures stay in their bands."""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tests.chat import save_chat_model

from qevict import policies
from qevict.bench.figures import as_record, claims, figures
from qevict.bench.models import load
from qevict.bench.needle import FULL, Contestant, Score, contestants, guest, measure
from qevict.bench.needles import load_needles
from qevict.bench.sharing import SharedMasses
from qevict.errors import PolicyError
from qevict.policy import Policy
from qevict.scorers.cumulative import CumulativeAttention
from qevict_baselines.snapkv import PooledHeads

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BAND_PROMPTS = 8
BAND = ("full", "QEvict, paper accounting, 20 %", "QEvict, 20 %", "evict-only, 20 %")
"""From better to worse; the record does not tell sinks + recent from evict-only."""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(save_chat_model(tmp_path_factory.mktemp("chat")))


def test_sharing_masses_changes_no_score(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {
        "evict": policies.evict_only("20 %"),
        "last queries": policies.evict_only("20 %", prompt_queries=16),
        "every 4th query": attrs.evolve(policies.evict_only("20 %"), scorer=CumulativeAttention(prompt_stride=4)),
        "qevict": policies.qevict("20 %"),
        "wide": policies.qevict("20 %", window_tokens=32),
        "bare": policies.evict_only("20 %", sink_tokens=0),
        "last 32 queries": policies.evict_only("20 %", prompt_queries=32),
        "single queries": attrs.evolve(policies.evict_only("20 %"), scorer=PooledHeads()),
        "16 bits": policies.evict_only("20 %", dtype=torch.bfloat16),
    }
    model, tokenizer = chat
    shared = measure(model, tokenizer, plans, load_needles()[:1])

    def alone(_shared: object, policy: Policy) -> Policy:
        return policy

    monkeypatch.setattr(SharedMasses, "give_to", alone)
    assert measure(model, tokenizer, plans, load_needles()[:1]) == shared
    assert len({scores[0].nats for scores in shared.values()}) == len(plans), "blind to the policy"


def test_the_field_is_complete_and_stores_16_bits() -> None:
    field = contestants(("20 %", "10 %"))
    assert len(field) == 1 + 2 * 7
    assert all(own.policy.dtype == torch.bfloat16 for own in field.values())
    assert all(own.against in field for name, own in field.items() if name != FULL)
    windows = {own.policy.window_tokens for own in field.values()}
    assert windows == {1, 8, 32}


def test_a_guest_meets_qevict_at_its_own_budget() -> None:
    field = contestants(("20 %",))
    assert guest(policies.evict_only("20 %"), field).against == "QEvict, 20 %"
    assert guest(policies.evict_only("30 %"), field).against == FULL
    assert guest(policies.full(), field).against == FULL
    assert guest(policies.evict_only("20 %"), field).policy.dtype == torch.bfloat16
    with pytest.raises(PolicyError, match="set it to bfloat16"):
        guest(policies.evict_only("20 %", dtype=torch.float32), field)


def test_only_what_excludes_zero_is_claimed() -> None:
    one = {"full": Contestant(policies.full(), None), "a": Contestant(policies.full(), "full")}

    def scores(*nats: float) -> list[Score]:
        return [Score(each, each, 1.0, 1.0) for each in nats]

    apart = figures(one, {"full": scores(0.1, 0.2, 0.1), "a": scores(1.1, 1.4, 1.2)})
    assert list(claims(apart)) == ["a: 1.10 nats more than full (+1.00 to +1.20)"]
    mixed = figures(one, {"full": scores(0.1, 1.5, 0.1), "a": scores(1.1, 0.2, 0.2)})
    assert list(claims(mixed)) == []
    plain = as_record(apart, command="x")
    assert plain["figures"]["a"]["nats_by_prompt"] == [1.1, 1.4, 1.2]
    assert json.loads(json.dumps(plain)) == plain


@functools.cache
def record() -> Any:
    return json.loads((RESULTS / "needle.json").read_text("utf-8"))


def recorded(name: str) -> float:
    """Mean of the recorded nats on the first prompts."""
    nats: list[float] = record()["figures"][name]["nats_by_prompt"][:BAND_PROMPTS]
    return sum(nats) / len(nats)


def test_the_record_is_of_this_field_and_its_full_cache_knows_every_answer() -> None:
    figures = record()["figures"]
    assert set(figures) == set(contestants(("20 %", "10 %")))
    assert record()["stored"] == "bfloat16"
    assert record()["prompts"] == len(load_needles()) == 48
    assert max(figures[FULL]["nats_by_prompt"]) < 0.5
    for name, row in figures.items():
        if name != FULL and "paper" not in name:
            assert row["exact_share"] <= float(name.rsplit(", ", 1)[1].removesuffix(" %")) / 100


@pytest.mark.real
def test_real_figures_stay_in_bands_that_exclude_the_next_worse_policy() -> None:
    """The ladder's sixth rung: each mean stays nearer to its own record than to any other policy's."""
    model, tokenizer = load()
    field = contestants(("20 %",))
    found = measure(model, tokenizer, {name: field[name].policy for name in BAND}, load_needles()[:BAND_PROMPTS])
    for better, worse in itertools.pairwise(BAND):
        gap = recorded(worse) - recorded(better)
        assert gap > 0.1, f"on these prompts {better} is not told from {worse}"
    for name, scores in found.items():
        mean = sum(score.nats for score in scores) / len(scores)
        nearest = min(BAND, key=lambda other: abs(recorded(other) - mean))
        assert nearest == name, f"{name} now loses {mean:.2f} nats, recorded {recorded(name):.2f}"
