"""What the windows of a sequence share as codes: fitted once, by lane, billed, and carried along."""

import copy
from typing import Any, ClassVar

import attrs
import pytest
import torch
from tests.hf.test_bytes import check_laws, feed
from tests.oracle import generate, prompts, replay, tiny
from torch import Tensor

import qevict
from qevict import policies
from qevict.contracts.quantizer import NOTHING_SHARED, Origin, Quantizer
from qevict.contracts.values import ArraySpec, Codes, Layout
from qevict.policy import Policy
from qevict.quantizers.affine import PerChannel

MODEL = tiny("llama", num_hidden_layers=2)


@attrs.frozen
class Recentred(Quantizer):
    """Takes the mean of the sequence off, and notes who was fitted."""

    name: ClassVar[str] = "recentred"
    grid: PerChannel = attrs.field(default=PerChannel(2))
    fitted: list[Origin] = attrs.field(factory=list, eq=False)
    bits: int = 2
    min_snr_db: float = 0.0
    keeps_constants: bool = False

    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        return self.grid.layout(window_tokens, head_dim)

    def shared_layout(self, head_dim: int) -> Layout:
        return {"mean": ArraySpec((head_dim,), torch.float32)}

    def fit(self, x: Tensor, origin: Origin) -> Codes:
        self.fitted.append(origin)
        return {"mean": x.float().mean((1, 2))}

    def encode(self, x: Tensor, shared: Codes = NOTHING_SHARED) -> Codes:
        return self.grid.encode(x.float() - shared["mean"].unsqueeze(2))

    def decode(self, codes: Codes, head_dim: int) -> Tensor:
        return self.grid.decode(codes, head_dim) + codes["mean"].unsqueeze(2)


def recentred(budget: str = "60 %", **changes: Any) -> Policy:
    """QEvict with such keys."""
    policy = policies.qevict(budget, recent_tokens=8).with_tier("int2", keys=Recentred())
    return attrs.evolve(policy, **changes)


def quantizer_of(cache: Any) -> Recentred:
    keys: Recentred = cache.policy.tiers[1].keys
    return keys


@pytest.mark.parametrize("granularity", ["row", "kv_head"])
def test_ragged_rows_equal_the_oracle_and_are_billed(granularity: Any) -> None:
    ids, mask = prompts(40, 150, 90)
    run = generate(MODEL, recentred(granularity=granularity), ids, mask)
    check_laws(run.cache)
    expected = replay(MODEL, run.sequences, mask, run.watch, patch=True)
    for own, theirs in zip(run.logits, expected, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)


def test_each_lane_is_fitted_once_with_its_layer_and_heads() -> None:
    ids, mask = prompts(120, 150)
    for granularity, heads in (("row", [(0, 1)]), ("kv_head", [(0,), (1,)])):
        run = generate(MODEL, recentred(granularity=granularity), ids, mask)
        expected = [Origin(layer, own) for layer in (0, 1) for _ in range(2) for own in heads]
        assert quantizer_of(run.cache).fitted == expected


def test_it_is_fitted_to_the_windows_that_are_encoded_first() -> None:
    ids, _ = prompts(150)
    with qevict.attach(MODEL, policies.full()) as session:
        whole = session.prefill(ids)
        keys = whole.engine.layers[0].history(150)[0][0]
    with qevict.attach(MODEL, recentred()) as session:
        cache = session.prefill(ids)
    layer = cache.engine.layers[0]
    windows = layer.records.window[layer.records.place == 1]
    positions = (windows.long()[:, None] * 8 + 5 + torch.arange(8)).flatten()
    assert 0 < len(positions) < 150
    assert cache.wiring.rotary is not None
    expected = cache.wiring.rotary.unrotate(keys[:, positions], positions).mean(1)
    torch.testing.assert_close(layer.shared[1]["keys.mean"][:, 0], expected, atol=1e-5, rtol=1e-5)


def test_a_row_of_a_batch_shares_with_nobody() -> None:
    ids, mask = prompts(60, 150)
    batch, solo = generate(MODEL, recentred(), ids, mask), generate(MODEL, recentred(), ids[1:])
    assert batch.sequences[1, 150:].tolist() == solo.sequences[0, 150:].tolist()
    for own, alone in zip(batch.cache.engine.layers, solo.cache.engine.layers, strict=True):
        torch.testing.assert_close(own.shared[1]["keys.mean"][:, 1], alone.shared[1]["keys.mean"][:, 0])


def test_bytes_at_every_step_of_a_tight_budget() -> None:
    cache = feed(recentred(), (150, 90), [1] * 40, MODEL)
    assert cache.report().windows["int2"]
    assert cache.wiring.shared_bytes == 2 * MODEL.config.head_dim * 4
    without = recentred().with_tier("int2", keys=PerChannel(2))
    other = feed(without, (150, 90), [], MODEL)
    assert cache.wiring.reserve_bytes == other.wiring.reserve_bytes + cache.wiring.shared_bytes


def test_rows_that_are_chosen_and_copies_take_it_along() -> None:
    ids, mask = prompts(120, 150)
    with qevict.attach(MODEL, recentred()) as session:
        cache = session.prefill(ids, mask)
        before = [layer.shared[1]["keys.mean"].clone() for layer in cache.engine.layers]
        twin = copy.deepcopy(cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        for layer, other, own in zip(cache.engine.layers, twin.engine.layers, before, strict=True):
            assert torch.equal(layer.shared[1]["keys.mean"], own[:, [1, 0]])
            assert torch.equal(other.shared[1]["keys.mean"], own)
        check_laws(cache)
        cache.batch_select_indices(torch.tensor([0]))
        check_laws(cache)


def test_it_is_fitted_anew_once_no_code_is_left() -> None:
    ids, _ = prompts(150)
    with qevict.attach(MODEL, recentred()) as session:
        cache = session.prefill(ids)
        quantizer = quantizer_of(cache)
        once = len(quantizer.fitted)
        session.generate(ids[:, :1], cache=cache, max_new_tokens=20, do_sample=False)
        assert len(quantizer.fitted) == once
        cache.reset()
        session.generate(ids, cache=cache, max_new_tokens=2, do_sample=False)
        assert len(quantizer.fitted) == 2 * once
