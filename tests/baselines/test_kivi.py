"""KIVI: only whole groups leave the residual, whatever the pieces in which tokens come (case C10)."""

from typing import Any

import pytest
import torch
from torch import Tensor

import qevict
from qevict.errors import PolicyError
from qevict.hf.compat import CACHE_ARGUMENT
from qevict_baselines.kivi import kivi
from qevict_baselines.plain import int2, int3, int4, int8
from tests.oracle import tiny

GROUP, RESIDUAL = 32, 64
MODEL = tiny("llama", num_hidden_layers=1, head_dim=32)
IDS = torch.randint(3, 97, (1, 700), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def fed(*pieces: int, first: int = 0) -> Any:
    """A cache that got its tokens in these pieces; the first is the prompt."""
    policy = kivi(group=GROUP, residual_tokens=RESIDUAL)
    with qevict.attach(MODEL, policy):
        cache = qevict.Cache(MODEL, policy)
        for piece in pieces:
            MODEL(IDS[:, first : first + piece], **{CACHE_ARGUMENT: cache})
            first += piece
            yield cache


def last(*pieces: int) -> Any:
    return [*fed(*pieces)][-1]


def quantised(cache: Any) -> int:
    layer = cache.engine.layers[0]
    return GROUP * int((layer.records.place == 0).sum())


@torch.no_grad()
def test_the_residual_drains_by_whole_groups() -> None:
    """C10 (a): 300 single tokens behind prompts that fill no group, as rows of one batch."""
    lengths = torch.tensor([1, 31, 32, 33, 127, 128, 129, 200])
    mask = (torch.arange(200) >= 200 - lengths[:, None]).long()
    ids = IDS[:, :200].expand(len(lengths), -1) * mask
    with qevict.attach(MODEL, kivi(group=GROUP, residual_tokens=RESIDUAL)) as session:
        cache = session.prefill(ids, mask)
        for step in range(301):
            codes = GROUP * torch.tensor(cache.engine.layers[0].records.counts[1])
            seen = lengths + step
            assert (seen.clamp(max=RESIDUAL) <= seen - codes).all()
            assert (seen - codes <= RESIDUAL + GROUP - 1).all()
            mask = torch.cat((mask, torch.ones(len(lengths), 1, dtype=torch.long)), dim=1)
            token = IDS[:, 200 + step : 201 + step].expand(len(lengths), -1)
            MODEL(token, attention_mask=mask, position_ids=seen[:, None], **{CACHE_ARGUMENT: cache})


def test_decode_tokens_are_really_quantised_to_half_a_step() -> None:
    """C10 (b): an error of exactly zero would mean that groups hold one token."""
    cache = last(33, *[1] * 300)
    with qevict.attach(MODEL, qevict.policies.full()) as session:
        whole = session.prefill(IDS[:, :333])
    rotated = whole.engine.layers[0].history(333)[0][0]
    keys = cache.wiring.rotary.unrotate(rotated, torch.arange(333))
    layer = cache.engine.layers[0]
    count = quantised(cache) // GROUP
    slots = layer.records.slots[layer.records.place == 0, 1].long()
    codes = {name.removeprefix("keys."): array[:, slots] for name, array in layer.pools[1].lend().items()}
    decoded = cache.policy.tiers[0].keys.decode(codes, 32)
    error = (decoded - keys[:, : count * GROUP].unflatten(1, (count, GROUP))).abs()
    assert quantised(cache) > 33 + GROUP
    behind_the_prompt = error[:, 2:]
    assert (behind_the_prompt.amax((2, 3)) > 0).all()
    assert (error <= codes["scale"].float().unsqueeze(2) / 2 + 1e-4).all()


def test_pieces_do_not_matter_bit_for_bit() -> None:
    """C10 (c): 500 tokens at once, one by one, and in odd pieces."""
    codes = []
    for pieces in ((500,), (1,) * 500, (7, 93, 400)):
        cache = last(*pieces)
        layer = cache.engine.layers[0]
        coded = layer.records.place == 0
        slots = layer.records.slots[coded, 1].long()
        assert layer.records.window[coded].tolist() == [*range((500 - RESIDUAL) // GROUP)]
        codes.append({name: array[:, slots] for name, array in layer.pools[1].lend().items()})
    for other in codes[1:]:
        assert_same_codes(codes[0], other)


def assert_same_codes(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Layer 0: what is encoded does not depend on attention, so that only the order of products may differ."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype
        assert torch.equal(array, other[name]), name


def test_heads_that_are_no_groups_are_refused_when_attached() -> None:
    with (
        pytest.raises(PolicyError, match="48 channels are no groups of 32"),
        qevict.attach(tiny("llama", num_hidden_layers=1, head_dim=48), kivi()),
    ):
        pass


@pytest.mark.parametrize(("preset", "least_bits"), [(int8, 8), (int4, 4), (int3, 3), (int2, 2)])
def test_plain_integers_keep_every_token(preset: Any, least_bits: int) -> None:
    policy = preset()
    with qevict.attach(MODEL, policy) as session:
        cache = session.prefill(IDS[:, :300])
        report = cache.report()
    assert cache.kept_positions(0)[0] == [*range(300)]
    assert report.evictions == 0
    assert report.bytes_by_kind["codes"] == (300 - 5 - 32) // 8 * 8 * 2 * 2 * 32 * least_bits // 8
