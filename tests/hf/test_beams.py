"""Beam search: every region and tier of a cache follows the beams."""

from typing import Any

import attrs
import pytest
import torch
from tests.engine.test_moves import check_slots
from tests.oracle import assert_sensitive, before_forwards, held, play_again, prompts, tiny
from torch import Tensor

import qevict
from qevict import policies
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy
from qevict.testing.footprint import reachable_bytes

BEAMS: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 3, "do_sample": False}
SAMPLED = BEAMS | {"do_sample": True, "temperature": 1.3}
SCORED: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}

POLICIES = {
    "evict": policies.evict_only("45 %", recent_tokens=16),
    "int8": policies.qevict("55 %", bits=8, recent_tokens=16),
    "int2": policies.qevict("40 %", recent_tokens=16),
    "int8_per_head": attrs.evolve(policies.qevict("60 %", bits=8, recent_tokens=16), granularity="kv_head"),
}


def small(impl: str = "sdpa") -> Any:
    """Two layers are enough to have several."""
    return tiny(impl=impl, num_hidden_layers=2)


@torch.no_grad()
def forced_scores(model: Any, policy: Policy, ids: Tensor, mask: Tensor, new: Tensor) -> Tensor:
    """Mean log-probability of answers that are fed to a cache of their own, token by token, without a reorder."""
    total, width = torch.zeros(len(new)), ids.shape[1]
    with qevict.attach(model, policy):
        cache = qevict.Cache(model, policy)
        mask = torch.cat((mask, torch.ones_like(new)), dim=1)
        for step, token in enumerate(new.unbind(1)):
            now = mask[:, : width + step]
            positions = (now.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = model(ids, attention_mask=now, position_ids=positions, **{CACHE_ARGUMENT: cache})
            total += out.logits[:, -1].log_softmax(-1).gather(1, token[:, None])[:, 0]
            ids = token[:, None]
    return total / new.shape[1]


def beams_of(out: Any) -> Tensor:
    """Which beam each token of each answer came from, counted within its prompt."""
    found: Tensor = out.beam_indices % BEAMS["num_beams"]
    return found


class TestC07BeamSearch:
    """Rows are independent, so a beam's score is that of its own tokens, whatever beam its past was computed in."""

    @pytest.mark.parametrize(("impl", "ask"), [("sdpa", BEAMS), ("eager", SAMPLED)], ids=["search", "sampling"])
    def test_one_dense_tier_is_the_dynamic_cache_bit_for_bit(self, impl: str, ask: dict[str, Any]) -> None:
        model, (ids, _) = small(impl), prompts(60, 60)
        assert_sensitive(model, ids, positions=(9, 30))
        torch.manual_seed(5)
        expected = model.generate(ids, max_new_tokens=60, **ask, **SCORED)
        torch.manual_seed(5)
        with qevict.attach(model, policies.full()) as session:
            found = session.generate(ids, max_new_tokens=60, **ask, **SCORED)
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.equal(found.sequences_scores, expected.sequences_scores)
        assert all(torch.equal(own, theirs) for own, theirs in zip(found.scores, expected.scores, strict=True))
        assert len(beams_of(found).unique()) > 2

    @pytest.mark.parametrize("name", POLICIES)
    def test_scores_are_those_of_the_answers_fed_alone(self, name: str) -> None:
        model, (ids, mask), policy = small(), prompts(23, 60), POLICIES[name]
        with qevict.attach(model, policy) as session:
            cache = session.cache()
            out = session.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=60, **BEAMS, **SCORED)
        report = cache.report()
        assert report.evictions
        assert report.exact_bytes == reachable_bytes(cache)
        check_slots(cache)
        own = (ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0), out.sequences[:, 60:])
        torch.testing.assert_close(forced_scores(model, policy, *own), out.sequences_scores, atol=1e-4, rtol=0)

    @pytest.mark.parametrize(
        ("name", "impl", "ask"),
        [("evict", "sdpa", BEAMS), ("int8", "eager", SAMPLED), ("int2", "sdpa", BEAMS)],
        ids=["evict", "int8", "int2"],
    )
    def test_equals_the_oracle(self, name: str, impl: str, ask: dict[str, Any]) -> None:
        model, (ids, mask), watch = small(impl), prompts(23, 60), []
        torch.manual_seed(5)
        with qevict.attach(model, POLICIES[name]) as session:
            cache = session.cache()

            def note(_number: int) -> None:
                watch.append([held(cache, model, layer) for layer in range(len(cache.engine.layers))])

            with before_forwards(model, note):
                out = session.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=60, **ask, **SCORED)
        assert len(beams_of(out).unique()) > 2
        torch.manual_seed(5)
        expected = play_again(model, watch, ids, mask, max_new_tokens=60, **ask, **SCORED)
        assert torch.equal(out.sequences, expected.sequences)
        for own, theirs in zip(out.scores, expected.scores, strict=True):
            torch.testing.assert_close(own, theirs, atol=2e-4, rtol=0)
