"""Many caches in one last forward: each row is what its cache alone would have given."""

from typing import Any

import attrs
import pytest
import torch
from tests.oracle import tiny

import qevict
from qevict import policies
from qevict.errors import InputError, UnsupportedOperationError
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.hf.together import read_last
from qevict.policy import Policy
from qevict_baselines.adakv import adakv

POLICIES: tuple[Policy, ...] = (
    policies.full(),
    policies.full(dtype=torch.bfloat16),
    policies.qevict("40 %"),
    policies.evict_only("30 %", window_tokens=4),
    adakv("40 %"),
    policies.qevict("40 %", prompt_queries=8),
    attrs.evolve(policies.evict_only("30 %"), min_tokens=100),
)


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(impl=request.param)


def ids(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 60, (1, tokens), generator=torch.Generator().manual_seed(seed))


def test_rows_are_what_each_cache_gives_alone(model: Any) -> None:
    prompt, last = ids(90), ids(23, 1)
    with qevict.attach(model, policies.full()) as session:
        recording = session.record(prompt)
        alone, together = ([qevict.Cache(model, policy) for policy in POLICIES] for _ in range(2))
        for cache in (*alone, *together):
            recording.play_into(cache)
        found = read_last(model, together, last, logits=9)
        with torch.no_grad():
            wanted = [model(last, **{CACHE_ARGUMENT: cache}).logits[:, -9:] for cache in alone]
        torch.testing.assert_close(found, torch.cat(wanted), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(found[0], found[2], atol=1e-2), "blind to the policy"


def test_caches_that_differ_in_time_or_rows_are_refused(model: Any) -> None:
    with qevict.attach(model, policies.full()) as session:
        one, other, two = session.prefill(ids(20)), session.prefill(ids(21)), session.prefill(ids(20).expand(2, -1))
        for caches in ([one, other], [two, two], [session.cache()], []):
            with pytest.raises(UnsupportedOperationError, match="read behind each alone"):
                read_last(model, caches, ids(2), logits=1)


def test_a_recording_cut_short_is_that_of_the_first_tokens(model: Any) -> None:
    with qevict.attach(model, policies.full()) as session:
        longer, shorter = session.record(ids(60)), session.record(ids(60)[:, :45])
        cut = longer.until(45)
        assert cut.nbytes == shorter.nbytes
        caches = [qevict.Cache(model, policies.qevict("50 %")) for _ in range(2)]
        for cache, recording in zip(caches, (cut, shorter), strict=True):
            recording.play_into(cache)
        found = read_last(model, caches, ids(5, 1), logits=5)
        torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)
        for tokens in (0, 61):
            with pytest.raises(InputError, match=r"1 \.\.\. 60"):
                longer.until(tokens)
        padded = session.record(ids(9).expand(2, -1), torch.tensor([[0] * 3 + [1] * 6, [1] * 9]))
        with pytest.raises(UnsupportedOperationError, match="pads"):
            padded.until(5)
