"""What a repetition of the prompt shows is what loops over the stock cache give."""

import copy
import importlib
from typing import Any, ClassVar

import attrs
import pytest
import torch
from tests.baselines.slow.kvzip import importance
from tests.engine.test_observing import Spy, spying
from tests.oracle import prompts, tiny
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

import qevict
from qevict import policies
from qevict.contracts.scorer import Repeats
from qevict.contracts.values import Need
from qevict.errors import UnsupportedOperationError
from qevict.hf.compat import CACHE_ARGUMENT

LENGTHS = (11, 20)
TOKENS, LEAD, INSTRUCTION = 8, 3, (5, 6)
SINKS = 2
GIVEN: dict[int, tuple[Tensor, Tensor]] = {}
"""Queries and keys of the last forward, by layer."""


def _taking_down(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    GIVEN[module.layer_idx] = query, key
    own = importlib.import_module(type(module).__module__).eager_attention_forward
    return own(module, query, key, value, mask, **kwargs)


AttentionInterface.register("taking_down", _taking_down)
AttentionMaskInterface.register("taking_down", eager_mask)


@attrs.frozen
class Repeated(Spy):  # the only way to ask for other pieces
    """A spy on repetitions."""

    name: ClassVar[str] = "repeated"
    repeats: Repeats | None = attrs.field(factory=lambda: Repeats(TOKENS, INSTRUCTION, LEAD))


def spy() -> Repeated:
    return Repeated(needs=frozenset({Need.RECONSTRUCTION}))


@torch.no_grad()
def plain(model: Any, text: Tensor) -> list[dict[int, list[list[float]]]]:
    """By piece and layer, the highest probability ``[query_head][token]`` of an unpadded prompt."""
    before, found = model.config._attn_implementation, []
    model.set_attn_implementation("taking_down")
    cache = DynamicCache(config=model.config)
    model(text[None], **{CACHE_ARGUMENT: cache})
    for start in range(0, len(text), TOKENS):
        end = min(start + TOKENS, len(text))
        ids = torch.cat((torch.tensor(INSTRUCTION), text[max(0, start - LEAD) : end]))
        model(ids[None], **{CACHE_ARGUMENT: copy.deepcopy(cache)})
        found.append({layer: by_head(*given, start, end, len(text)) for layer, given in GIVEN.items()})
    model.set_attn_implementation(before)
    return found


def by_head(query: Tensor, key: Tensor, start: int, end: int, length: int) -> list[list[float]]:
    """``[query_head][token]`` of the piece; each query head is given to the loop as a group of its own."""
    group = query.shape[1] // key.shape[1]
    return [
        importance(
            [query[0, head].tolist()],
            [key[0, head // group, start:end].tolist()],
            [key[0, head // group, length:].tolist()],
            [key[0, head // group, :SINKS].tolist() if start else []],
        )[0]
        for head in range(query.shape[1])
    ]


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("granularity", ["row", "kv_head"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_it_is_the_highest_probability_by_window(window: int, granularity: str, chunk: int | None) -> None:
    """Of rows of unequal length, of which the shorter has fewer pieces and repeats its last one."""
    model, (ids, mask), seen = tiny(num_hidden_layers=2), prompts(*LENGTHS), spy()
    with qevict.attach(model, spying(seen, window_tokens=window, granularity=granularity)) as session:
        cache = session.prefill(ids, mask, chunk_tokens=chunk)
    assert cache.get_seq_length() == 20
    assert len(seen.seen) == 3 * 2
    texts = [ids[row, max(LENGTHS) - length :] for row, length in enumerate(LENGTHS)]
    expected = [plain(model, text) for text in texts]
    for number, observation in enumerate(seen.seen):
        piece, layer = divmod(number, 2)
        assert observation.mass is None
        assert not observation.ends_prompt
        shown = observation.reconstruction
        per_row = observation.lanes_per_row
        assert shown.shape[:3] == (2 * per_row, 2 // per_row, 2)
        for row, length in enumerate(LENGTHS):
            own = min(piece, len(expected[row]) - 1)
            start = own * TOKENS
            heads = shown[row * per_row : (row + 1) * per_row].flatten(0, 2)
            for head, tokens in enumerate(expected[row][own][layer]):
                highest: dict[int, float] = {}
                for position, probability in enumerate(tokens, start=start):
                    column = (position - SINKS) // window
                    if column >= 0:
                        highest[column] = max(highest.get(column, 0), probability)
                for column in range(-(-(length - SINKS) // window)):
                    assert float(heads[head, column]) == pytest.approx(highest.get(column, 0), abs=1e-5)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
@torch.no_grad()
def test_sinks_and_caps_of_the_model_count(family: str) -> None:
    """Against the model's own attention, where the piece is all of a prompt, so that its softmax is the same."""
    model, ids = tiny(family, impl="eager"), prompts(20)[0]
    seen = attrs.evolve(spy(), repeats=Repeats(64, INSTRUCTION, 0))
    with qevict.attach(model, spying(seen, window_tokens=1, granularity="row")) as session:
        session.prefill(ids)
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE_ARGUMENT: cache})
    again = torch.cat((torch.tensor([INSTRUCTION]), ids), dim=1)
    attention = model(again, output_attentions=True, **{CACHE_ARGUMENT: cache}).attentions[1]
    [found] = seen.seen
    expected = attention[0, :, :, SINKS:20].amax(1)
    torch.testing.assert_close(found.reconstruction.flatten(0, 2)[:, :18], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_plain_forward_is_refused_before_anything_is_stored() -> None:
    model, ids = tiny(num_hidden_layers=1), prompts(20)[0]
    with qevict.attach(model, attrs.evolve(policies.evict_only("50 %"), scorer=spy())) as session:
        cache = session.cache()
        with pytest.raises(UnsupportedOperationError, match=r"session\.prefill\(context_ids\)"):
            model(ids, **{CACHE_ARGUMENT: cache})
        cache.check_whole()
        assert cache.get_seq_length() == 0
        assert cache.nbytes() == 0
