"""``pipeline("text-generation")`` and ``TextStreamer`` with a cache that a policy rules."""

from typing import Any

import pytest
import torch
from tests.chat import byte_tokenizer
from tests.oracle import tiny
from transformers import TextStreamer, pipeline

import qevict
from qevict import policies
from qevict.hf.compat import CACHE_ARGUMENT

POLICY = policies.evict_only("40 %", recent_tokens=8)
ASK: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
LONG = "the quick brown fox jumps over the lazy dog, and once more, " * 2


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    """A tiny model and its tokenizer, which pads with a token of its own on the left."""
    tokenizer = byte_tokenizer(merges=[("Ċ", "Ċ")])
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.padding_side = "left"
    model = tiny(vocab_size=len(tokenizer), num_hidden_layers=2)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def test_a_text_with_a_cache_of_the_session(parts: tuple[Any, Any]) -> None:
    model, tokenizer = parts
    ids = tokenizer(LONG, return_tensors="pt").input_ids
    with qevict.attach(model, POLICY) as session:
        cache = session.cache()
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        found = pipe(LONG, return_full_text=False, **ASK, **{CACHE_ARGUMENT: cache})[0]["generated_text"]
        expected = session.generate(ids, **ASK)
    assert found == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert cache.get_seq_length() == ids.shape[1] + 7
    assert len(cache.kept_positions(0)[0]) < ids.shape[1]


def test_a_chat_and_a_batch_of_texts(parts: tuple[Any, Any]) -> None:
    model, tokenizer = parts
    chat = [{"role": "user", "content": LONG}]
    texts = [LONG, LONG[:40]]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with qevict.attach(model, POLICY) as session:
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        said = pipe(chat, **ASK, **{CACHE_ARGUMENT: session.cache()})[0]["generated_text"]
        both = pipe(texts, batch_size=2, return_full_text=False, **ASK, **{CACHE_ARGUMENT: session.cache()})
        answer = session.generate(ids, **ASK)[0, ids.shape[1] :]
        answers = session.generate(batch.input_ids, attention_mask=batch.attention_mask, **ASK)
    assert said[-1] == {"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)}
    for own, theirs in zip(both, answers[:, batch.input_ids.shape[1] :], strict=True):
        assert own[0]["generated_text"] == tokenizer.decode(theirs, skip_special_tokens=True)


def test_without_a_cache_of_ours_it_is_the_stock_pipeline(parts: tuple[Any, Any]) -> None:
    model, tokenizer = parts
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    expected = pipe(LONG, **ASK)
    with qevict.attach(model, POLICY):
        assert pipe(LONG, **ASK) == expected


def test_a_streamer_is_given_every_token(parts: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = parts
    ids = tokenizer(LONG, return_tensors="pt").input_ids
    with qevict.attach(model, POLICY) as session:
        expected = session.generate(ids, **ASK)
        found = session.generate(ids, streamer=TextStreamer(tokenizer, skip_prompt=True), **ASK)
    assert torch.equal(found, expected)
    assert capsys.readouterr().out.strip("\n") == tokenizer.decode(expected[0, ids.shape[1] :]).strip("\n")
