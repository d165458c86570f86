"""Tokens taken back, and caches emptied: as if what is gone had never been, or refused."""

from typing import Any, ClassVar

import attrs
import pytest
import torch
from tests.engine.test_moves import check_slots
from tests.oracle import assert_sensitive, prompts, tiny
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

import qevict
from qevict import errors, policies
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy
from qevict.scorers.cumulative import CumulativeAttention
from qevict.testing.footprint import reachable_bytes

EVICTING = policies.sinks_recent("60 %", recent_tokens=8)


@attrs.frozen(eq=False)
class Stream:
    """Rows of tokens, left-padded, which caches are fed pieces of."""

    model: Any
    ids: Tensor
    mask: Tensor

    @classmethod
    def of(cls, model: Any, *lengths: int, more: int = 60) -> "Stream":
        """Prompts of these lengths, and tokens that follow."""
        ids, mask = prompts(*lengths)
        new, _ = prompts(*(more for _ in lengths), seed=3)
        return cls(model, torch.cat((ids, new), 1), torch.cat((mask, torch.ones_like(new)), 1))

    @torch.no_grad()
    def feed(self, cache: Any, *ends: int) -> Tensor:
        """Forwards up to these slots; the last one's logits."""
        for end in ends:
            start = cache.get_seq_length()
            mask = self.mask[:, :end]
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:]
            new = self.ids[:, start:end]
            out = self.model(new, attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache})
        return out.logits  # type: ignore[no-any-return]

    def check_equal(self, cropped: Any, fresh: Any) -> None:
        """Now, and over the next events."""
        assert type(cropped.get_seq_length()) is int
        for _ in range(10):
            assert cropped.get_seq_length() == fresh.get_seq_length()
            assert cropped.kept_positions(1) == fresh.kept_positions(1)
            assert cropped.nbytes() == reachable_bytes(cropped)
            assert cropped.report() == fresh.report()
            check_slots(cropped)
            end = cropped.get_seq_length() + 1
            torch.testing.assert_close(self.feed(cropped, end), self.feed(fresh, end), atol=1e-5, rtol=0)


def small() -> Any:
    """Two layers."""
    return tiny(num_hidden_layers=2)


CROPS: dict[str, tuple[Policy, tuple[int, ...], int]] = {
    "into the prompt": (policies.full(), (60,), 3),
    "the prompt alone": (policies.full(), (60,), 29),
    "across events": (policies.full(), (60, 70, 71, 72, 80, 81, 82), 13),
    "between events": (policies.full(), (60, *range(61, 85)), 13),
    "across all events": (policies.full(), (60, *range(61, 85)), 30),
    "inside a forward": (policies.full(), (60, 64, 79), 5),
    "behind an eviction": (EVICTING, (60, *range(61, 80)), 3),
    "to the last event": (EVICTING, (60, *range(61, 80)), 3),
    "below min_tokens": (attrs.evolve(EVICTING, min_tokens=75), (60, *range(61, 72)), 9),
    "beyond min_tokens": (attrs.evolve(policies.full(), min_tokens=66), (60, 63, 70), 2),
}


class TestC02Crop:
    """What is left is a cache that never saw what is gone."""

    @pytest.mark.parametrize("count", [-3, torch.tensor(-3)], ids=["int", "tensor"])
    @pytest.mark.parametrize("policy", [policies.full(), EVICTING, policies.sinks_recent("20 %")])
    def test_ten_tokens_less_three_plus_three_others(self, policy: Policy, count: Any) -> None:
        model, (ids, _) = small(), prompts(40)
        assert_sensitive(model, ids, positions=(5, 9))
        stream = Stream.of(model, 10)
        with qevict.attach(model, policy):
            cropped, fresh = qevict.Cache(model, policy), qevict.Cache(model, policy)
            stream.feed(cropped, 10)
            cropped.crop(count)
            stream.ids[:, 7:10] = (stream.ids[:, 7:10] + 7) % 90 + 3
            stream.feed(fresh, 7)
            for cache in (cropped, fresh):
                stream.feed(cache, 10)
            stream.check_equal(cropped, fresh)

    @pytest.mark.parametrize(
        ("name", "lengths"),
        [("across events", (60,)), ("behind an eviction", (60,)), *((name, (30, 60)) for name in CROPS)],
        ids=str,
    )
    def test_equals_a_cache_that_never_saw_the_tokens(self, name: str, lengths: tuple[int, ...]) -> None:
        policy, ends, count = CROPS[name]
        model = small()
        stream = Stream.of(model, *lengths)
        with qevict.attach(model, policy):
            cropped, fresh = qevict.Cache(model, policy), qevict.Cache(model, policy)
            stream.feed(cropped, *ends)
            cropped.crop(-count)
            left = ends[-1] - count
            stream.feed(fresh, *(end for end in ends if end < left), left)
            stream.check_equal(cropped, fresh)

    def test_inside_a_prompt_that_still_comes(self) -> None:
        model, policy = small(), policies.sinks_recent("40 %")
        stream = Stream.of(model, 30, 60)
        with qevict.attach(model, policy):
            cropped, fresh = qevict.Cache(model, policy), qevict.Cache(model, policy)
            for cache in (cropped, fresh):
                cache.expect(60)
            stream.feed(cropped, 20, 50)
            cropped.crop(-15)
            stream.feed(fresh, 20, 35)
            for cache in (cropped, fresh):
                stream.feed(cache, 60)
            stream.check_equal(cropped, fresh)
        assert cropped.report().evictions

    def test_row_after_row_at_once(self) -> None:
        """Rows that a reorder repeated take their events with them."""
        model, policy = small(), policies.full()
        stream = Stream.of(model, 30, 60)
        turned = Stream(model, stream.ids[[1, 0]], stream.mask[[1, 0]])
        with qevict.attach(model, policy):
            cropped, fresh = qevict.Cache(model, policy), qevict.Cache(model, policy)
            stream.feed(cropped, 60, *range(61, 80))
            cropped.reorder_cache(torch.tensor([1, 0]))
            cropped.crop(-12)
            turned.feed(fresh, 60, *range(61, 68))
            turned.check_equal(cropped, fresh)

    def test_nothing_to_take_back(self) -> None:
        model = small()
        with qevict.attach(model, EVICTING) as session:
            for cache in (session.cache(), session.prefill(prompts(60)[0])):
                before = cache.nbytes()
                cache.crop(0)
                cache.crop(torch.tensor(0))
                assert cache.nbytes() == before

    @pytest.mark.parametrize(
        ("count", "reason"),
        [(3, "minus the number of tokens"), (True, "whole number"), (-1.5, "whole number"),
         (torch.tensor([-1]), "whole number"), (-60, "at least 1"), (-61, "at least 1"), (-30, "from row 0")],
    )  # fmt: skip
    @pytest.mark.usefixtures("unchecked")
    def test_what_is_no_removal(self, count: Any, reason: str) -> None:
        model = small()
        with qevict.attach(model, policies.full()) as session:
            cache = session.prefill(*prompts(30, 60))
        with pytest.raises(errors.InputError, match=reason):
            cache.crop(count)
        cache.crop(-29)
        assert cache.report().tokens == (1, 31)

    def test_pads_between_turns(self) -> None:
        """What lies before them cannot be told; what comes after can."""
        model, (ids, _) = small(), prompts(20, 20)
        mask = torch.ones(2, 34, dtype=torch.long)
        mask[0, 20:24] = 0
        stream = Stream(model, torch.cat((ids, ids[:, :14]), 1), mask)
        with qevict.attach(model, policies.full()):
            cache = qevict.Cache(model, policies.full())
            stream.feed(cache, 20, 30, 34)
            with pytest.raises(errors.InputError, match="without a pad"):
                cache.crop(-11)
            cache.crop(-10)
        assert cache.report().tokens == (20, 24)

    def test_what_an_event_has_moved_stays_moved(self) -> None:
        model = small()
        stream = Stream.of(model, 60)
        with qevict.attach(model, EVICTING):
            cache = qevict.Cache(model, EVICTING)
            stream.feed(cache, 60, 62)
            before = cache.report()
            with pytest.raises(errors.UnsupportedOperationError, match=r"event came 2 tokens ago.*fork"):
                cache.crop(-3)
            assert cache.report() == before
            cache.crop(-2)
        assert cache.report().tokens == (60,)

    def test_what_a_scorer_has_weighed_stays_weighed(self) -> None:
        model = small()
        with qevict.attach(model, policies.qevict("40 %")) as session:
            cache = session.prefill(prompts(60)[0])
            with pytest.raises(errors.UnsupportedOperationError, match=r"scorer 'cumulative' has weighed.*fork"):
                cache.crop(-1)

    def test_a_strict_policy_refuses_before_anything_is_changed(self) -> None:
        policy = attrs.evolve(policies.sinks_recent("100 %", recent_tokens=8), accounting="paper", strict=True)
        model = small()
        with qevict.attach(model, policy) as session:
            cache = session.prefill(prompts(60)[0])
            before = cache.report()
            with pytest.raises(errors.BudgetExceededError):
                cache.crop(-55)
            assert cache.report() == before

    def test_layers_of_the_library_are_cropped_or_refuse(self) -> None:
        model = small()
        with qevict.attach(model, policies.full()) as session:
            for window, works in ((64, True), (32, False)):
                cache = session.prefill(prompts(40)[0])
                sliding = DynamicSlidingWindowLayer(window)
                sliding.update(torch.ones(1, 2, 40, 16), torch.ones(1, 2, 40, 16))
                cache.layers.append(sliding)
                if not works:
                    with pytest.raises(errors.UnsupportedOperationError, match="DynamicSlidingWindowLayer"):
                        cache.crop(-5)
                    assert cache.report().tokens == (40,)
                    continue
                cache.crop(-5)
                (cropped,) = cache.library_layers
                assert cropped.keys.shape[2] == 35
                assert cache.report().tokens == (35,)


@attrs.define
class _Fuse:
    left: int


@attrs.frozen
class Explodes(CumulativeAttention):  # the only way to break a forward from inside
    """Raises in one update."""

    name: ClassVar[str] = "explodes"
    fuse: _Fuse = attrs.field(factory=lambda: _Fuse(2), eq=False)

    def update(self, state: Any, observation: Any) -> Any:
        self.fuse.left -= 1
        if not self.fuse.left:
            raise RuntimeError("scorer broke")
        return CumulativeAttention.update(self, state, observation)


class TestReset:
    """A cache that was reset is a new one."""

    def test_after_events_and_with_layers_of_the_library(self) -> None:
        model, policy, (ids, mask) = small(), policies.qevict("40 %"), prompts(30, 60)
        with qevict.attach(model, policy) as session:
            cache = session.prefill(ids, mask)
            sliding = DynamicSlidingWindowLayer(32)
            sliding.update(torch.ones(1, 2, 40, 16), torch.ones(1, 2, 40, 16))
            cache.layers.append(sliding)
            cache.reset()
            assert cache.get_seq_length() == sliding.get_seq_length() == 0
            assert sliding.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16))[0].shape[2] == 3
            cache.layers.pop()
            assert cache.nbytes() == session.cache().nbytes() == reachable_bytes(cache)
            again = session.generate(ids[1:], cache=cache, max_new_tokens=10, do_sample=False)
            assert torch.equal(again, session.generate(ids[1:], max_new_tokens=10, do_sample=False))

    def test_after_a_forward_that_broke_off(self) -> None:
        model, (ids, _) = small(), prompts(60)
        policy = attrs.evolve(policies.evict_only("40 %"), scorer=Explodes())
        with qevict.attach(model, policy), torch.no_grad():
            cache: Any = qevict.Cache(model, policy)
            with pytest.raises(RuntimeError, match="scorer broke"):
                model(ids, **{CACHE_ARGUMENT: cache})
            for change in (
                lambda: cache.crop(-1),
                lambda: cache.reorder_cache(torch.tensor([0])),
                lambda: cache.batch_select_indices(torch.tensor([0])),
                lambda: cache.batch_repeat_interleave(2),
                cache.fork,
                cache.__reduce__,
                lambda: cache.save("never.safetensors"),
            ):
                with pytest.raises(errors.InterruptedCacheError, match="reset"):
                    change()
            cache.reset()
            model(ids, **{CACHE_ARGUMENT: cache})
        assert cache.get_seq_length() == 60

    def test_a_prompt_that_was_announced_is_forgotten(self) -> None:
        model = small()
        with qevict.attach(model, policies.full()) as session:
            cache = session.cache()
            cache.expect(50)
            cache.reset()
        assert cache.engine.clock.prompt_tokens is None
