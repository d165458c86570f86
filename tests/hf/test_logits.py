"""Capped logits (Gemma 2) and sink logits (GPT-OSS), from the model's own call of attention to the backend and back."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from tests.oracle import prompts, tiny
from torch import Tensor
from transformers import Gemma2Config, GptOssConfig
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

import qevict
from qevict import errors, policies
from qevict.backends.flash import FlashAttention
from qevict.contracts.values import Geometry
from qevict.engine.engine import Engine
from qevict.engine.wiring import Wiring
from qevict.hf import attention
from qevict.hf.layer import CacheLayer, Turn

SIZES: Any = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
}
POLICY = attrs.evolve(
    policies.evict_only("50 %", window_tokens=4, period_tokens=4, sink_tokens=3, recent_tokens=4), budget=None
)


@attrs.frozen
class Model:
    """A model's attention: its module, its eager function, and what it passes along."""

    module: Any
    eager: Callable[..., tuple[Tensor, Tensor]]
    options: dict[str, Any]


def gemma2() -> Model:
    module = modeling_gemma2.Gemma2Attention(Gemma2Config(attn_logit_softcapping=2.0, **SIZES), 0).eval()
    options = {"scaling": module.scaling, "softcap": module.attn_logit_softcapping}
    return Model(module, modeling_gemma2.eager_attention_forward, options)


def gpt_oss() -> Model:
    module = modeling_gpt_oss.GptOssAttention(GptOssConfig(**SIZES), 0).eval()
    with torch.no_grad():
        module.sinks.copy_(torch.tensor([2.0, -1.0, 4.0, 0.5]))
    return Model(module, modeling_gpt_oss.eager_attention_forward, {"scaling": module.scaling, "s_aux": module.sinks})


@attrs.define
class Both:
    """The same tokens through a policy that keeps everything, and through the model's own attention over all of them.

    Attributes:
        model: whose attention.
        layer: the policy's.
        valid: ``[rows, slots]`` what is no pad.
        keys: of all tokens so far.
        values: likewise.
        mass: ``[rows, q_heads, slots]`` probabilities of the model's own attention, summed over the queries.
    """

    model: Model
    layer: CacheLayer
    valid: Tensor
    keys: Tensor
    values: Tensor
    mass: Tensor

    @classmethod
    def start(cls, model: Model, policy: Any, rows: int) -> "Both":
        wiring = Wiring(policy, Geometry(1, 4, 2, 16, torch.float32), None)
        turn = Turn(SimpleNamespace(_attn_implementation="qevict_eager"))
        none = torch.zeros(rows, 2, 0, 16)
        layer = CacheLayer(0, Engine.start(wiring), turn)
        return cls(model, layer, torch.ones(rows, 0, dtype=torch.bool), none, none, torch.zeros(rows, 4, 0))

    def forward(self, valid: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Outputs of both, ``[real queries, q_heads, head_dim]``."""
        rows, new = valid.shape
        query, key, value = (torch.randn(rows, heads, new, 16, generator=generator) for heads in (4, 2, 2))
        query, key = 2 * query, 2 * key
        self.valid = torch.cat((self.valid, valid), 1)
        self.keys, self.values = torch.cat((self.keys, key), 2), torch.cat((self.values, value), 2)
        slots = torch.arange(self.valid.shape[1])
        seen = self.valid[:, None] & (slots <= slots[-new:, None])
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]
        setattr(mask, attention._OWN_MASK, True)
        module, options = self.model.module, self.model.options
        positions = (self.valid.cumsum(1) - 1).clamp(min=0)[:, -new:]
        tagged, passed = self.layer.update(key, value)
        ours, _ = attention.attend(module, query, tagged, passed, mask, base="eager", position_ids=positions, **options)
        theirs, weights = self.model.eager(module, query, self.keys, self.values, mask, **options)
        mass = torch.nn.functional.pad(self.mass, (0, new))
        self.mass = mass + (weights * valid[:, None, :, None]).sum(2)
        return ours[valid], theirs[valid]

    def wanted_scores(self) -> list[float]:
        """Summed masses of every window, line by line as the policy records them."""
        records, wanted = self.layer.engine.layers[0].records, []  # type: ignore[attr-defined]
        lanes_per_row = records.lanes // len(self.valid)
        for lane, window in zip(records.lane_of().tolist(), records.window.tolist(), strict=True):
            row, head = divmod(lane, lanes_per_row)
            heads = slice(None) if lanes_per_row == 1 else slice(2 * head, 2 * head + 2)
            first = int((~self.valid[row]).sum()) + 3 + 4 * window
            wanted.append(float(self.mass[row, heads, first : first + 4].sum(-1).mean()))
        return wanted


@pytest.mark.parametrize("granularity", ["row", "kv_head"])
@pytest.mark.parametrize("lengths", [(30,), (30, 17)])
@pytest.mark.parametrize("make", [gemma2, gpt_oss])
@torch.no_grad()
def test_outputs_and_scores_are_those_of_the_models_own_attention(
    make: Callable[[], Model], lengths: tuple[int, ...], granularity: Any
) -> None:
    """Prompt, single tokens and a turn of several; alone and in a padded batch."""
    generator = torch.Generator().manual_seed(0)
    both = Both.start(make(), attrs.evolve(POLICY, granularity=granularity), len(lengths))
    prompt = torch.arange(30) >= 30 - torch.tensor(lengths)[:, None]
    for new in (prompt, *(torch.ones(len(lengths), count, dtype=torch.bool) for count in (1, 3, 1))):
        ours, theirs = both.forward(new, generator)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    scores = both.layer.engine.layers[0].records.state["mass"]  # type: ignore[attr-defined]
    torch.testing.assert_close(scores, torch.tensor(both.wanted_scores()), rtol=1e-4, atol=1e-4)


def test_a_recording_carries_what_the_model_does_to_its_logits() -> None:
    """The scores of a cache that it plays into come from a second pass over the recorded queries."""
    model, (ids, _) = tiny(num_hidden_layers=1), prompts(60)
    found = []
    with qevict.attach(model, POLICY) as session:
        recording = session.record(ids)
        for changes in ({}, {"softcap": 0.5}, {"sink_logits": torch.full((4,), 6.0)}):
            own = attrs.evolve(recording, incoming=tuple(attrs.evolve(each, **changes) for each in recording.incoming))
            cache = session.cache()
            own.play_into(cache)
            found.append(cache.engine.layers[0].records.state["mass"])
    plain, capped, with_sinks = found
    assert not torch.allclose(capped, plain, rtol=1e-2)
    assert float(with_sinks.sum()) < 0.9 * float(plain.sum())


def test_a_cap_that_sdpa_would_ignore_is_refused() -> None:
    model = tiny(num_hidden_layers=1, attn_logit_softcapping=30.0)
    wanted = r"sdpa cannot cap logits as its attn_logit_softcapping=30.0 asks; load it with attn_implementation='eager'"
    with pytest.raises(errors.UnsupportedModelError, match=wanted), qevict.attach(model, POLICY):
        pytest.fail("attached")
    model.set_attn_implementation("eager")
    with qevict.attach(model, attrs.evolve(POLICY, backend=FlashAttention())) as session:
        assert "do not cap logits" in session.cache().wiring.choice.reason
