"""C06: where keys and queries are rotated: at true positions, or, as StreamingLLM has it, at places in the cache."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

import qevict
from qevict.engine.landing import land
from qevict.hf.compat import CACHE_ARGUMENT
from tests.baselines.zoo import LENGTHS, NEW, SAMPLED, batch_of, model_of, policy_of, solo_of, steps
from tests.oracle import Held, before_forwards, prompts, replay

SHOWN: dict[int, Held] = {}
"""By layer, what was held before the forward under way."""


def turned(model: Any, vectors: Tensor, by: Tensor) -> Tensor:
    """Vectors ``[rows, heads, tokens, head_dim]``, turned by ``[rows, tokens]`` positions as the model would."""
    apply = importlib.import_module(type(model.get_decoder()).__module__).apply_rotary_pos_emb
    cos, sin = model.get_decoder().rotary_emb(vectors, by.abs())
    rotated: Tensor = apply(vectors, vectors, cos, sin * by.sign()[..., None])[0]
    return rotated


def places(keep: Tensor) -> Tensor:
    """``[rows, tokens]`` the place of each token that is held, and of those that come."""
    return keep.long().cumsum(1) - 1


def _at_places(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """Attention of one new token, with everything that is held turned to its place."""
    own = importlib.import_module(type(module).__module__).eager_attention_forward
    if module.layer_idx in SHOWN:
        assert query.shape[2] == 1
        keep = SHOWN[module.layer_idx].keep[:, 0]
        keep = torch.cat((keep, keep.new_ones(len(keep), 1)), dim=1)
        pads = module.pads[:, None]
        gap = places(keep) - (torch.arange(keep.shape[1]) - pads)
        model = module.model_of_test
        query, key = turned(model, query, gap[:, -1:]), turned(model, key, gap)
        mask = torch.where(keep, 0.0, torch.finfo(query.dtype).min)[:, None, None]
    return own(module, query, key, value, mask, **kwargs)


AttentionInterface.register("at_places", _at_places)
AttentionMaskInterface.register("at_places", eager_mask)


@contextlib.contextmanager
def attending_at_places(model: Any, pads: Tensor, watch: list[dict[int, Held]]) -> Iterator[None]:
    """The first forward is the prompt; before each later one, what was held then is shown."""

    def show(number: int) -> None:
        SHOWN.clear()
        SHOWN.update(watch[number - 1] if number else {})

    modules = [layer.self_attn for layer in model.get_decoder().layers]
    for module in modules:
        object.__setattr__(module, "model_of_test", model)
        object.__setattr__(module, "pads", pads)
    before = model.config._attn_implementation
    model.set_attn_implementation("at_places")
    try:
        with before_forwards(model, show):
            yield
    finally:
        SHOWN.clear()
        model.set_attn_implementation(before)
        for module in modules:
            object.__delattr__(module, "model_of_test")
            object.__delattr__(module, "pads")


@torch.no_grad()
def test_streaming_llm_equals_attention_at_places_in_the_cache() -> None:
    """Rung 2, in a padded batch: keys turned back and rotated anew, at every step, by the model's own rotation."""
    model, batch = model_of(), batch_of("streaming_llm")
    mask, width = batch.mask, batch.mask.shape[1]
    cache = DynamicCache(config=model.config)
    with attending_at_places(model, width - mask.sum(1), batch.watch):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(batch.sequences[:, :width], attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache})
        for step, own in enumerate(batch.logits):
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
            new, position = batch.sequences[:, width + step, None], mask.sum(1, keepdim=True) - 1
            out = model(new, attention_mask=mask, position_ids=position, **{CACHE_ARGUMENT: cache})
            torch.testing.assert_close(own, out.logits[:, -1], atol=1e-4, rtol=0)
    original = replay(model, batch.sequences, batch.mask, batch.watch, patch=False)[1:]
    assert any((own - theirs).abs().max() > 1e-2 for own, theirs in zip(batch.logits, original, strict=True))


@torch.no_grad()
def test_streaming_llm_turns_keys_to_their_places() -> None:
    """Keys as attention reads them, after several evictions, up to one turn of all of them."""
    model, (ids, _) = model_of(), prompts(70)
    rotary = model.get_decoder().rotary_emb
    apply = importlib.import_module(type(model.get_decoder()).__module__).apply_rotary_pos_emb
    before: list[Tensor] = []
    attention = model.get_decoder().layers[0].self_attn
    handle = attention.k_proj.register_forward_hook(
        lambda _module, _inputs, output: before.append(output.detach().unflatten(-1, (2, 16)).transpose(1, 2))
    )
    with qevict.attach(model, policy_of("streaming_llm")) as session:
        cache = session.prefill(ids)
        for step in range(3):
            model(ids[:, step : step + 1], **{CACHE_ARGUMENT: cache})
    handle.remove()
    engine, [kept] = cache.engine, cache.kept_positions(0)
    assert kept[:4] == [0, 1, 2, 3]
    assert kept[-1] == 72
    assert len(kept) < 40
    layer = engine.layers[0]
    assert engine.clock.offset is not None
    assert layer.totals.evictions > 70 - 40
    view = layer.view(land(engine.wiring, engine.clock.still(), engine.clock.offset))
    found = {position: view.sink_keys[0, :, position] for position in range(4)}
    for position, slot in zip(view.positions[0].tolist(), view.slots[0].tolist(), strict=True):
        found[position] = view.keys[:, slot, 0]
    keys = torch.stack([found[position] for position in kept], dim=1)[None]
    plain = torch.cat(before, dim=2)[:, :, kept]
    gap = kept[-1] - (len(kept) - 1)
    at = (torch.arange(len(kept)) + gap)[None]
    torch.testing.assert_close(keys, apply(plain, plain, *rotary(plain, at))[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SAMPLED)
@torch.no_grad()
def test_a_hand_loop_without_position_ids_equals_generate(name: str) -> None:
    """A cache says how much it has seen, not how much it holds."""
    model, run = model_of(), solo_of(name)
    with qevict.attach(model, policy_of(name)) as session:
        cache = session.prefill(prompts(*LENGTHS)[0][1:2, -LENGTHS[1] :])
        text, logits = steps(model, cache)
    assert cache.get_seq_length() == LENGTHS[1] + NEW
    assert text == run.text(0)
    for own, generated in zip(logits, run.logits, strict=True):
        torch.testing.assert_close(own, generated, atol=1e-5, rtol=0)
