"""More than one prompt and its answer: turns of a chat, prompts in pieces, answers continued, rows that end early."""

from typing import Any

import pytest
import torch
from tests.hf.test_cases import by_key_norm, int4_only
from tests.oracle import Watch, assert_sensitive, prompts, replay, tiny
from torch import Tensor

import qevict
from qevict import errors, policies
from qevict.hf import compat
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy

GREEDY: dict[str, Any] = {"do_sample": False}
EVICTING = policies.evict_only("25 %", recent_tokens=16)


class TestC03ChatWithAReusedCache:
    """Each turn attends to what is kept of the turns before it and to all of itself, at its true positions."""

    @pytest.mark.parametrize(
        ("impl", "policy", "patch"),
        [("sdpa", EVICTING, False), ("eager", EVICTING, False), ("sdpa", policies.qevict("30 %"), True)],
        ids=["sdpa", "eager", "codes"],
    )
    def test_three_turns_equal_the_oracle(self, impl: str, policy: Policy, patch: bool) -> None:
        model, (text, mask) = tiny(impl=impl), prompts(200)
        assert_sensitive(model, text)
        logits: list[Tensor] = []
        later: list[int] = []
        with qevict.attach(model, policy) as session:
            cache = session.prefill(text)
            assert len(cache.kept_positions(0)[0]) < 150
            watch = Watch(cache, model)
            watch(text, text)
            for turn, _ in (prompts(7, seed=1), prompts(9, seed=2)):
                unread = text[:, cache.get_seq_length() :]  # the last token of an answer is in no cache yet
                new = torch.cat((unread, turn), dim=1)
                later += [new.shape[1], 1, 1, 1, 1, 1]
                out = session.generate(
                    new,
                    cache=cache,
                    max_new_tokens=6,
                    return_dict_in_generate=True,
                    output_logits=True,
                    logits_processor=[watch],
                    **GREEDY,
                )
                logits += out.logits
                text = torch.cat((text[:, : text.shape[1] - unread.shape[1]], out.sequences), dim=1)
        _, *expected = replay(model, text, mask, watch.steps, patch=patch, later=later)
        for own, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)

    @pytest.mark.parametrize("policy", [EVICTING, int4_only("60 %")], ids=["evict", "int4"])
    def test_questions_over_one_context_in_any_order_equal_fresh_runs(self, policy: Policy) -> None:
        model, (ids, _) = tiny(num_hidden_layers=2), prompts(200)
        questions = [prompts(7, seed=seed)[0] for seed in (1, 2, 3)]
        with qevict.attach(model, policy) as session:
            context = session.prefill(ids)

            def ask(index: int, cache: Any) -> list[int]:
                found = session.generate(questions[index], cache=cache, max_new_tokens=8, **GREEDY)
                return [*found[0].tolist(), len(cache.kept_positions(0)[0])]

            fresh = {index: ask(index, session.prefill(ids)) for index in (0, 1, 2)}
            assert len({tuple(answer[7:]) for answer in fresh.values()}) > 1
            for order in ((0, 1, 2), (2, 1, 0)):
                assert {index: ask(index, context.fork()) for index in order} == fresh


class TestC05ChunkedPrefill:
    """However a prompt is cut, the policy compresses once, when all of it is there."""

    CHUNKS = (64, 50, 299, 1)

    def run(self, policy: Policy, chunk: int | None, new: int = 1) -> tuple[list[int], Any]:
        model, (ids, mask) = tiny(num_hidden_layers=1), prompts(120, 300)
        with qevict.attach(model, policy) as session:
            cache = session.cache()
            how = {} if chunk is None else {"prefill_chunk_size": chunk}
            out = session.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=new, **GREEDY, **how)
        return out[:, 300:].tolist(), cache

    def test_counts_are_those_of_the_whole_prompt_and_within_the_budget(self) -> None:
        _, whole = self.run(policies.evict_only("20 %", recent_tokens=8), None)
        for chunk in self.CHUNKS:
            _, pieces = self.run(policies.evict_only("20 %", recent_tokens=8), chunk)
            counts = [len(kept) for kept in pieces.kept_positions(0)]
            assert counts == [len(kept) for kept in whole.kept_positions(0)]
            assert all(0 < count <= most for count, most in zip(counts, (24, 60), strict=True))

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_a_score_of_keys_alone_keeps_the_same_and_answers_the_same(self, chunk: int) -> None:
        text, whole = self.run(by_key_norm("20 %"), None, new=16)
        found, pieces = self.run(by_key_norm("20 %"), chunk, new=16)
        assert found == text
        assert pieces.kept_positions(0) == whole.kept_positions(0)

    @pytest.mark.skipif(not compat.LATER_CHUNKS, reason="this transformers cuts the mask of a later turn wrongly")
    def test_a_later_turn_in_pieces(self) -> None:
        model, (ids, mask), (turn, _) = tiny(num_hidden_layers=2), prompts(40, 90), prompts(30, 30, seed=1)
        with qevict.attach(model, policies.full()) as session:
            ask = {"max_new_tokens": 8, **GREEDY}
            expected = session.generate(turn, cache=session.prefill(ids, mask), **ask)
            for chunk in (8, 29, 1):
                cache = session.prefill(ids, mask)
                assert torch.equal(session.generate(turn, cache=cache, prefill_chunk_size=chunk, **ask), expected)

    def test_a_later_turn_in_pieces_where_the_library_cannot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, (ids, _) = tiny(num_hidden_layers=1), prompts(40)
        monkeypatch.setattr(compat, "LATER_CHUNKS", False)
        with qevict.attach(model, policies.full()) as session:
            cache = session.cache()
            session.generate(ids, cache=cache, prefill_chunk_size=16, max_new_tokens=2, **GREEDY)
            with pytest.raises(errors.UnsupportedOperationError, match=r"5\.21.*prefill_chunk_size"):
                session.generate(ids, cache=cache, prefill_chunk_size=16, max_new_tokens=2, **GREEDY)


class TestContinuedGeneration:
    """An answer cut short and gone on with is the answer in one piece."""

    @pytest.mark.parametrize("policy", [EVICTING, policies.qevict("30 %")], ids=["evict", "codes"])
    def test_by_the_new_token_or_by_the_whole_text(self, policy: Policy) -> None:
        model, (ids, mask) = tiny(num_hidden_layers=2), prompts(50, 120)
        assert_sensitive(model, ids[1:])
        with qevict.attach(model, policy) as session:
            expected = session.generate(ids, attention_mask=mask, max_new_tokens=24, **GREEDY)
            cache = session.cache()
            half = session.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=12, **GREEDY)
            again = cache.fork()
            rest = session.generate(half[:, -1:], cache=cache, max_new_tokens=12, **GREEDY)
            assert torch.equal(torch.cat((half, rest[:, 1:]), dim=1), expected)
            whole = torch.cat((mask, mask.new_ones(2, 12)), dim=1)
            text = model.generate(half, attention_mask=whole, max_new_tokens=12, **GREEDY, **{CACHE_ARGUMENT: again})
            assert torch.equal(text, expected)


class TestRowsThatFinishEarly:
    """A row that has met its end token is fed pads from then on; the others do not notice."""

    @pytest.mark.parametrize("policy", [EVICTING, policies.qevict("30 %")], ids=["evict", "codes"])
    def test_the_others_are_unchanged(self, policy: Policy) -> None:
        model, (ids, mask) = tiny(num_hidden_layers=2), prompts(40, 90, 140)
        ask = {"attention_mask": mask, "max_new_tokens": 32, **GREEDY}
        with qevict.attach(model, policy) as session:
            free, cache = session.cache(), session.cache()
            answers = session.generate(ids, cache=free, **ask)[:, 140:]
            seen = [set(row.tolist()) for row in answers]
            ends = [token for token in answers[1, 2:12].tolist() if token not in seen[0] | seen[2]]
            found = session.generate(ids, cache=cache, eos_token_id=ends[0], pad_token_id=0, **ask)[:, 140:]
        assert (found[1] == 0).sum() > 16
        for row in (0, 2):
            assert torch.equal(found[row], answers[row])
            assert all(cache.kept_positions(layer)[row] == free.kept_positions(layer)[row] for layer in (0, 1))


class TestSeveralSequences:
    """``num_return_sequences`` repeats the prompt before it is read."""

    def test_samples_are_those_of_the_stock_cache(self) -> None:
        model, (ids, _) = tiny(), prompts(60)
        ask: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3}
        torch.manual_seed(5)
        expected = model.generate(ids, **ask)
        assert len({tuple(row) for row in expected.tolist()}) == 3
        with qevict.attach(model, policies.full()) as session:
            torch.manual_seed(5)
            assert torch.equal(session.generate(ids, **ask), expected)

    def test_each_is_a_row_of_its_own(self) -> None:
        model, (ids, _) = tiny(), prompts(120)
        with qevict.attach(model, EVICTING) as session:
            cache = session.cache()
            session.generate(ids, cache=cache, max_new_tokens=20, do_sample=True, num_return_sequences=3)
            solo = session.prefill(ids)
        assert cache.report().tokens == (139, 139, 139)
        prompt = [{at for at in kept if at < 60} for kept in cache.kept_positions(0)]
        assert all(early <= set(solo.kept_positions(0)[0]) for early in prompt)
