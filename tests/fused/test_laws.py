"""The fused backend keeps the laws of a backend, for both sets of instructions and every layout that it reads."""

from typing import ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from qevict.quantizers.affine import PerChannel, PerToken
from qevict.testing import BackendContract
from qevict.testing.scenes import BackendCase, Codecs
from qevict_fused import FusedAttention
from tests.fused import needs_avx2, needs_operator
from tests.fused.layouts import PLAIN, SCOPES, TRANSFORMED

pytestmark = needs_operator


class OneToken(BackendContract):
    """One token of every lane, so that the operator answers, over more windows than a piece has."""

    examples: ClassVar[int] = 5
    codecs: ClassVar[Codecs] = PLAIN
    window_tokens: ClassVar[int] = 8
    head_dim: ClassVar[int] = 64

    def cases(self) -> SearchStrategy[BackendCase]:
        return st.builds(
            BackendCase,
            lanes=st.integers(1, 3),
            heads=st.integers(1, 2),
            group=st.sampled_from([1, 2, 3, 4, 5, 8, 11]),
            queries=st.just(1),
            sinks=st.integers(0, 5),
            windows=st.sampled_from([0, 1, 2, 5, 70]),
            dense=st.integers(0, 10),
            dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
            seed=st.integers(0, 1000),
            softcap=st.sampled_from([None, None, 3.0]),
            sink_logits=st.booleans(),
        )


class TestPortable(OneToken):
    part = FusedAttention(instructions="portable")


@pytest.mark.slow
class TestPortableScopes(OneToken):
    part = FusedAttention(instructions="portable")
    codecs = SCOPES


@pytest.mark.slow
class TestPortableTransformed(OneToken):
    part = FusedAttention(instructions="portable")
    codecs = TRANSFORMED


@pytest.mark.slow
class TestPortableShortWindows(OneToken):
    part = FusedAttention(instructions="portable")
    codecs = TRANSFORMED
    window_tokens = 4


@needs_avx2
class TestAvx2(TestPortable):
    part = FusedAttention(instructions="avx2")


@needs_avx2
class TestAvx2Scopes(OneToken):
    part = FusedAttention(instructions="avx2")
    codecs = SCOPES


@needs_avx2
class TestAvx2Transformed(OneToken):
    part = FusedAttention(instructions="avx2")
    codecs = TRANSFORMED
    head_dim = 80


@needs_avx2
class TestAvx2ShortWindows(OneToken):
    part = FusedAttention(instructions="avx2")
    codecs = TRANSFORMED
    window_tokens = 4


class TestOneTokenWindows(OneToken):
    part = FusedAttention()
    codecs = ((PerChannel(4, scope="sequence"), PerToken(2)),)
    window_tokens = 1


class TestLongWindows(OneToken):
    part = FusedAttention()
    codecs = ((PerChannel(3), PerToken(3)), (PerChannel(2), PerToken(8)))
    window_tokens = 24


class TestManyTokens(BackendContract):
    """Forwards of many tokens go to the flash backend."""

    part = FusedAttention()
    codecs = TRANSFORMED
    examples = 2
