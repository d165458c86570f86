"""Copies of a filled cache, in memory and between processes."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tests.oracle import assert_sensitive, prompts, tiny
from torch import Tensor

import qevict
from qevict import errors, policies
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.scorers.recency import Recency
from qevict.testing.footprint import reachable_bytes, reachable_tensors

POLICIES = {
    "full": policies.full(),
    "evict": policies.evict_only("50 %"),
    "int2": policies.qevict("40 %"),
    "int8_per_head": attrs.evolve(policies.qevict("60 %", bits=8), granularity="kv_head"),
}
ASK: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


STATES = ("empty", "residual", "chunked", "events")


def small() -> Any:
    """Two layers."""
    return tiny(num_hidden_layers=2)


def contents(cache: Any) -> list[Tensor]:
    """Copies of all tensors that a cache holds."""
    return [tensor.clone() for tensor in reachable_tensors(cache)]


def filled(model: Any, policy: Any, state: str) -> Any:
    """A cache in some state of its life."""
    ids, mask = prompts(40, 120)
    with qevict.attach(model, policy) as session, torch.no_grad():
        cache = session.cache()
        if state == "residual":  # nothing has aged
            model(ids[:, -9:], **{CACHE_ARGUMENT: cache})
        if state == "chunked":
            cache.expect(120)
            model(ids[:, :50], attention_mask=mask[:, :50], **{CACHE_ARGUMENT: cache})
        if state == "events":
            cache = session.prefill(ids, mask)
            session.generate(ids[:, -3:], cache=cache, **ASK)
    return cache


@torch.no_grad()
def next_logits(model: Any, policy: Any, cache: Any, steps: int = 9) -> Tensor:
    """Over the next event."""
    pads = torch.tensor([cache.get_seq_length() - own for own in cache.report().tokens or (0, 0)])
    mask, out = (torch.arange(cache.get_seq_length()) >= pads[:, None]).long(), []
    with qevict.attach(model, policy):
        for step in range(steps):
            mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), dim=1)
            new, positions = torch.full((2, 1), 5 + step), mask.sum(1, keepdim=True) - 1
            out.append(model(new, attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache}).logits)
    return torch.cat(out)


def pickled(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))  # noqa: S301 - our own


def stored(cache: Any) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": stored}


class TestC18Copies:
    """A copy goes on as the original would, and neither disturbs the other."""

    @pytest.mark.parametrize("name", ["int2", "int8_per_head"])
    def test_questions_on_copies_in_any_order_equal_fresh_runs(self, name: str) -> None:
        model, policy, (ids, _) = small(), POLICIES[name], prompts(120)
        assert_sensitive(model, ids)
        questions = [prompts(length, seed=length)[0] for length in (3, 7, 5)]
        with qevict.attach(model, policy) as session:
            fresh = [session.generate(question, cache=session.prefill(ids), **ASK) for question in questions]
            cache = session.prefill(ids)
            before = contents(cache)
            for order in ((0, 1, 2), (2, 0, 1)):
                for index in order:
                    assert torch.equal(
                        session.generate(questions[index], cache=copy.deepcopy(cache), **ASK), fresh[index]
                    )
        assert all(torch.equal(own, old) for own, old in zip(contents(cache), before, strict=True))

    @pytest.mark.parametrize("state", STATES)
    @pytest.mark.parametrize(("name", "way"), [("full", "pickle"), *(("int8_per_head", way) for way in WAYS)])
    def test_copies_in_every_state(self, name: str, way: str, state: str) -> None:
        model, policy = small(), POLICIES[name]
        cache = filled(model, policy, state)
        if state == "events":
            assert name == "full" or cache.report().evictions
        other = WAYS[way](cache)
        assert other.nbytes() == reachable_bytes(other) == cache.nbytes()
        assert other.report() == cache.report()
        for own, old in zip(other.engine.layers, cache.engine.layers, strict=True):
            for column in ("window", "place", "moves", "slots"):
                assert torch.equal(getattr(own.records, column), getattr(old.records, column))
            assert all(torch.equal(own.records.state[name], column) for name, column in old.records.state.items())
        ours, theirs = (
            {tensor.data_ptr() for tensor in reachable_tensors(one) if tensor.numel()} for one in (cache, other)
        )
        constant = cache.wiring.rotary  # the rotary table is the model's, and nobody writes to it
        assert ours & theirs <= ({constant.inverse_frequencies.data_ptr()} if constant else set())
        expected = next_logits(model, policy, cache)
        assert torch.equal(next_logits(model, policy, other), expected)
        assert other.report() == cache.report()

    def test_a_pickle_costs_what_the_cache_holds(self) -> None:
        """Tables that layers share as views of one storage are not written once for each of them."""
        cache = filled(small(), POLICIES["int2"], "events")
        assert len(pickle.dumps(cache)) < cache.nbytes() + 20_000

    def test_in_a_new_interpreter(self, tmp_path: Path) -> None:
        model = small()
        cache = filled(model, POLICIES["int2"], "events")
        (tmp_path / "cache.pickle").write_bytes(pickle.dumps(cache))
        code = (
            "import pickle, sys, torch\n"
            "from tests.hf.test_copies import POLICIES, next_logits, small\n"
            f"cache = pickle.load(open({str(tmp_path / 'cache.pickle')!r}, 'rb'))\n"
            f"torch.save(next_logits(small(), POLICIES['int2'], cache), {str(tmp_path / 'logits')!r})\n"
        )
        root = Path(__file__).parents[2]
        path = [str(root), *sys.path]
        subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"], check=True, cwd=root)
        assert torch.equal(torch.load(tmp_path / "logits"), next_logits(model, POLICIES["int2"], cache))

    def test_a_pickle_leaves_the_model_behind(self) -> None:
        model, policy, (ids, _) = small(), POLICIES["int2"], prompts(120)
        with qevict.attach(model, policy) as session:
            other: Any = pickled(session.prefill(ids))
            text = pickle.dumps(other)
            assert b"LlamaConfig" not in text
            expected = session.generate(ids[:, :5], cache=session.prefill(ids), **ASK)
            assert torch.equal(session.generate(ids[:, :5], cache=other.fork(), **ASK), expected)
        calls: list[int] = []
        handle = model.base_model.layers[1].self_attn.o_proj.register_forward_hook(lambda *_: calls.append(1))
        with pytest.raises(errors.NotAttachedError, match="attach"), torch.no_grad():
            model(ids[:, :1], **{CACHE_ARGUMENT: other})
        handle.remove()
        assert not calls, "the second layer attended"


def test_a_row_that_is_named_twice_holds_its_budget_twice() -> None:
    """Room to grow is paid from what all rows have left over, and one of them may have got more of it."""
    policy = attrs.evolve(
        policies.evict_only("40 tokens", window_tokens=2, period_tokens=1, sink_tokens=0, recent_tokens=0),
        scorer=Recency(),
        granularity="kv_head",
    )
    ids = prompts(45)[0]
    with qevict.attach(tiny(num_hidden_layers=2), policy) as session:
        cache = session.prefill(ids)
        cache.batch_select_indices(torch.tensor([0, 0]))
        session.generate(ids[:, :1].expand(2, 1), cache=cache, max_new_tokens=1, do_sample=False)
        cache.reorder_cache(torch.tensor([0, 0]))
        report = cache.report()
    assert report.overshoot_bytes == 0, report
