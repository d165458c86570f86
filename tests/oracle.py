"""An oracle for caches that a policy rules: a full stock cache, masked and patched to what the policy holds.

A random model at the usual initialisation answers the same whatever its context says, and would pass with any broken
cache. ``tiny`` models are made sensitive, and ``assert_sensitive`` refuses those that are not.
"""

import contextlib
import importlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.masking_utils import eager_mask

import qevict
from qevict.hf.compat import CACHE_ARGUMENT

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = {"sliding_window": 32}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
# A random Gemma at a larger initialisation repeats one token for ever.
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "initializer_range": 0.02, "layer_types": HYBRID}
# So small a cap bends the small logits of such a model.
SOFTCAP = {"attn_logit_softcapping": 0.2, "query_pre_attn_scalar": 1}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS | {"head_dim": 32, "moe_intermediate_size": 48}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "phi3_partial": (Phi3ForCausalLM, Phi3Config, {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "mistral_sliding": (MistralForCausalLM, MistralConfig, WINDOW),
    "qwen2_sliding": (Qwen2ForCausalLM, Qwen2Config, WINDOW | {"use_sliding_window": True, "max_window_layers": 2}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, WINDOW | GEMMA | SOFTCAP),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, WINDOW | GEMMA),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig, WINDOW | EXPERTS | {"head_dim": 16, "layer_types": HYBRID}),
}


def impls(family: str) -> list[str]:
    """The attention implementations that a family has."""
    return ["eager"] if family in {"gemma2", "gpt_oss"} else ["sdpa", "eager"]


def tiny(family: str = "llama", *, impl: str = "sdpa", seed: int = 0, **sizes: Any) -> Any:
    """A small random model whose output depends on its context."""
    model_class, config_class, own = FAMILIES[family]
    base = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = model_class._from_config(config_class(**(base | own | sizes)), attn_implementation=impl).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def prompts(*lengths: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Left-padded random prompts and their mask."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(3, 97, (length,), generator=generator)
    return ids, (ids > 0).long()


def assert_sensitive(model: Any, ids: Tensor, positions: tuple[int, ...] = (9, 60), new: int = 24) -> None:
    """Changing one early or middle token must change the greedy continuation, or the test proves nothing."""
    ask = {"max_new_tokens": new, "do_sample": False}
    stock = model.generate(ids, **ask)[:, ids.shape[1] :]
    for position in positions:
        changed = ids.clone()
        changed[:, position] = (changed[:, position] + 7) % 90 + 3
        if (model.generate(changed, **ask)[:, ids.shape[1] :] != stock).any():
            return
    message = "the fixture is blind to its context"
    raise AssertionError(message)


@attrs.frozen(eq=False)
class Held:
    """What one layer holds: ``[rows, kv_heads, slots]`` presence and ``[..., head_dim]`` keys and values."""

    keep: Tensor
    keys: Tensor
    values: Tensor


def held(cache: Any, model: Any, index: int) -> Held:
    """Read a ruled layer's pools by hand: codes through their quantizer, positions through the model's own rotation."""
    engine, wiring = cache.engine, cache.wiring
    layer, clock, policy = engine.layers[index], engine.clock, cache.policy
    rows, heads, head_dim = len(clock.tokens), wiring.geometry.kv_heads, wiring.geometry.head_dim
    keep = torch.zeros(rows, heads, clock.seen, dtype=torch.bool)
    keys = torch.zeros(rows, heads, clock.seen, head_dim)
    values = torch.zeros_like(keys)

    def put(lane: int, position: int, key: Tensor, value: Tensor) -> None:
        row, first = divmod(lane, wiring.lanes_per_row)
        own = slice(first, first + 1) if wiring.lanes_per_row > 1 else slice(None)
        start = clock.seen - clock.tokens[row] + position
        end = min(start + key.shape[1], clock.seen)
        keep[row, own, start:end] = True
        keys[row, own, start:end] = key[:, : end - start].float()
        values[row, own, start:end] = value[:, : end - start].float()

    for lane in range(layer.lanes):
        if policy.sink_tokens:
            put(lane, 0, layer.sink_keys[lane], layer.sink_values[lane])
    blocks = _blocks(layer, model, clock.offset)
    windows = layer.records.window.tolist()
    for line, lane in enumerate(layer.records.lane_of().tolist()):
        first = policy.sink_tokens + windows[line] * policy.window_tokens
        if first < clock.tokens[lane // wiring.lanes_per_row]:
            put(lane, first, blocks[0][:, line], blocks[1][:, line])
    return Held(keep, keys, values)


def _blocks(layer: Any, model: Any, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated keys and values ``[heads, lines, window, head_dim]`` of every record, from the pool of its place."""
    wiring, records = layer.wiring, layer.records
    policy, head_dim = wiring.policy, wiring.geometry.head_dim
    segment = (records.place.long() + wiring.first_segment).clamp(min=0)
    shape = (wiring.heads, records.lines, policy.window_tokens, head_dim)
    keys, values = torch.zeros(shape), torch.zeros(shape)
    apply = importlib.import_module(type(model.get_decoder()).__module__).apply_rotary_pos_emb
    for index, pool in enumerate(layer.pools):
        lines = (segment == index).nonzero()[:, 0]
        if not len(lines):
            continue
        arrays = {name: array[:, records.slots[lines, index].long()] for name, array in pool.lend().items()}
        arrays |= {name: array[:, records.lane_of()[lines]] for name, array in layer.shared.arrays[index].items()}
        if index == 0:
            keys[:, lines], values[:, lines] = arrays["keys"].float(), arrays["values"].float()
            continue
        parts: dict[str, dict[str, Tensor]] = {"keys": {}, "values": {}}
        for name, array in arrays.items():
            kind, own = name.split(".")
            parts[kind][own] = array
        for_keys, for_values = wiring.codecs[index - 1]
        first = records.window[lines].long() * policy.window_tokens + policy.sink_tokens
        first = first + offset[records.lane_of()[lines] // wiring.lanes_per_row]
        positions = first[:, None] + torch.arange(policy.window_tokens)
        pre = for_keys.decode(parts["keys"], head_dim).transpose(0, 1)
        rotary, layer_type = model.get_decoder().rotary_emb, ("full_attention",)
        cos, sin = rotary(pre, positions, *layer_type if hasattr(rotary, "full_attention_inv_freq") else ())
        keys[:, lines] = apply(pre, pre, cos, sin)[1].transpose(0, 1)
        values[:, lines] = for_values.decode(parts["values"], head_dim)
    return keys, values


def scores(layer: Any, name: str = "mass") -> list[list[float]]:
    """A column of the scorer's state by lane, in order of position."""
    found: list[dict[int, float]] = [{} for _ in range(layer.lanes)]
    records = layer.records
    lines = zip(records.lane_of().tolist(), records.window.tolist(), records.state[name].tolist(), strict=True)
    for lane, window, value in lines:
        found[lane][window] = value
    return [[lane[window] for window in sorted(lane)] for lane in found]


class Watch(LogitsProcessor):
    """Notes what a cache holds after every forward of generate."""

    def __init__(self, cache: Any, model: Any) -> None:
        self.cache, self.model = cache, model
        self.steps: list[dict[int, Held]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.steps.append(
            {layer: held(self.cache, self.model, own) for own, layer in enumerate(self.cache.ruled_layers)}
        )
        return scores


_STEP: dict[int, Held] = {}
_PATCH = False


def _oracle_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    own = importlib.import_module(type(module).__module__).eager_attention_forward
    if module.layer_idx in _STEP:
        now = _STEP[module.layer_idx]
        old = now.keep.shape[2]
        if _PATCH:
            key, value = key.clone(), value.clone()
            known = now.keep[..., None]
            key[:, :, :old] = torch.where(known, now.keys, key[:, :, :old])
            value[:, :, :old] = torch.where(known, now.values, value[:, :, :old])
        gone = torch.zeros(*key.shape[:2], 1, key.shape[2])
        gone[:, :, 0, :old] = torch.where(now.keep, 0.0, torch.finfo(query.dtype).min)
        gone = gone.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        mask = gone if mask is None else mask + gone
    return own(module, query, key, value, mask, **kwargs)


AttentionInterface.register("oracle", _oracle_attention)
AttentionMaskInterface.register("oracle", eager_mask)


@contextlib.contextmanager
def oracle(model: Any) -> Iterator[None]:
    """Let the oracle's attention run the model."""
    before = model.config._attn_implementation
    model.set_attn_implementation("oracle")
    try:
        yield
    finally:
        _STEP.clear()
        model.set_attn_implementation(before)


@torch.no_grad()
def replay(
    model: Any,
    sequences: Tensor,
    mask: Tensor,
    watch: list[dict[int, Held]],
    *,
    patch: bool,
    later: Sequence[int] | None = None,
) -> list[Tensor]:
    """Logits of a full run over the same tokens, each later step seeing only what the policy held before it.

    Args:
        model: the model, without a policy.
        sequences: prompt and generated tokens.
        mask: of the prompt.
        watch: what was held after each forward.
        patch: put the held keys and values in place of the oracle's own.
        later: tokens of each forward after the prompt; None for one each.
    """
    global _PATCH  # noqa: PLW0603 - the attention function is called by transformers
    _PATCH = patch
    width = mask.shape[1]
    cache = DynamicCache(config=model.config)
    found = []
    with oracle(model):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(sequences[:, :width], attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache})
        found.append(out.logits[:, -1])
        for before, tokens in zip(watch, later or (1,) * (len(watch) - 1), strict=False):
            _STEP.clear()
            _STEP.update(before)
            mask = torch.cat((mask, mask.new_ones(len(mask), tokens)), dim=1)
            position, width = mask.cumsum(1)[:, -tokens:] - 1, width + tokens
            new = sequences[:, width - tokens : width]
            out = model(new, attention_mask=mask, position_ids=position, **{CACHE_ARGUMENT: cache})
            found.append(out.logits[:, -1])
    return found


@torch.no_grad()
def forwards(model: Any, pieces: Sequence[Tensor], watch: Sequence[dict[int, Held]], *, patch: bool) -> list[Tensor]:
    """Logits of the same unpadded forwards with a stock cache, each seeing only what the policy held before it.

    Args:
        model: the model, without a policy.
        pieces: the tokens of each forward.
        watch: what was held before each forward, nothing before the first.
        patch: put the held keys and values in place of the oracle's own.
    """
    global _PATCH  # noqa: PLW0603 - the attention function is called by transformers
    _PATCH = patch
    cache = DynamicCache(config=model.config)
    found = []
    with oracle(model):
        for piece, known in zip(pieces, watch, strict=True):
            _STEP.clear()
            _STEP.update(known)
            found.append(model(piece, **{CACHE_ARGUMENT: cache}).logits)
    return found


@attrs.frozen(eq=False)
class Run:
    """A generation under a policy: tokens, logits, and what was held after every forward."""

    sequences: Tensor
    logits: list[Tensor]
    watch: list[dict[int, Held]]
    cache: Any


def generate(model: Any, policy: Any, ids: Tensor, mask: Tensor | None = None, new: int = 24, **how: Any) -> Run:
    """Generate under a policy and watch."""
    with qevict.attach(model, policy) as session:
        cache = session.cache()
        cache.expect(ids.shape[1])
        watch = Watch(cache, model)
        out = session.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            return_dict_in_generate=True,
            output_logits=True,
            logits_processor=[watch],
            **({"do_sample": False} | how),
            **{CACHE_ARGUMENT: cache},
        )
    return Run(out.sequences, list(out.logits), watch.steps, cache)


@contextlib.contextmanager
def before_forwards(model: Any, note: Any) -> Iterator[None]:
    """Call ``note(number)`` before each forward of a model."""
    numbers = itertools.count()
    handle = model.register_forward_pre_hook(lambda *_: note(next(numbers)))
    try:
        yield
    finally:
        handle.remove()


def play_again(model: Any, watch: list[dict[int, Held]], ids: Tensor, mask: Tensor, **ask: Any) -> Any:
    """The same call of generate with a stock cache, each forward seeing what the policy held just before it.

    Args:
        model: the model, without a policy.
        watch: what was held before each forward; nothing before the first.
        ids: the prompt.
        mask: of the prompt.
        **ask: as the policy's generate was asked.
    """
    global _PATCH  # noqa: PLW0603 - the attention function is called by transformers
    _PATCH = True

    def show(number: int) -> None:
        _STEP.clear()
        _STEP.update(watch[number])

    with oracle(model), before_forwards(model, show):
        return model.generate(ids, attention_mask=mask, **ask)
