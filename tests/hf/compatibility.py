"""What works with which family of models: every cell is run, and `docs/compatibility.md` says what came out.

``python -m tests.hf.compatibility`` writes the page anew; ``test_compatibility.py`` runs each cell and compares.
"""

import copy
import functools
import io
import pickle
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from tests.oracle import FAMILIES, assert_sensitive, impls, prompts, tiny
from tests.wrapped import text_pipeline, with_lora
from torch import Tensor
from transformers import DynamicCache, TextStreamer

import qevict
from qevict import errors, policies
from qevict.hf.compat import CACHE_ARGUMENT
from qevict_template import KeyNorm

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
EVICTING = policies.evict_only("40 %", recent_tokens=8)
ENCODING = policies.qevict("40 %", recent_tokens=8)
NEW = 12
ASK: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
"""Greedy, and as many tokens as make an event."""


@functools.cache
def model_of(family: str) -> Any:
    """One model of each family, whose answers depend on the context; nothing here changes it."""
    model = tiny(family, impl=impls(family)[0])
    assert_sensitive(model, prompts(60)[0], positions=(9, 40))
    return model


def stock(model: Any, ids: Tensor, **how: Any) -> Any:
    """The model's own generation, from one seed."""
    torch.manual_seed(5)
    return model.generate(ids, **how)


def ruled(model: Any, policy: Any, ids: Tensor, **how: Any) -> Any:
    """Generation under a policy, from the same seed."""
    torch.manual_seed(5)
    with qevict.attach(model, policy) as session:
        return session.generate(ids, **how)


def same(found: Any, expected: Any) -> None:
    """Equal tokens."""
    assert torch.equal(found, expected), (found, expected)


def decodes(model: Any, ids: Tensor | None = None, **how: Any) -> None:
    """With ``full`` the tokens are those of the stock cache; with a budget there are as many."""
    ids = prompts(60)[0] if ids is None else ids
    how = ASK | how
    expected = stock(model, ids, **how)
    same(ruled(model, policies.full(), ids, **how), expected)
    for policy in (EVICTING, ENCODING):
        with qevict.attach(model, policy) as session:
            cache = session.cache()
            assert session.generate(ids, cache=cache, **how).shape == expected.shape
        report = cache.report()
        assert report.evictions + report.demotions > 0 or not cache.ruled_layers


def greedy(model: Any) -> None:
    """Tokens of the stock cache without a budget; with one, as many, and something was given up."""
    decodes(model)


def sampling(model: Any) -> None:
    """Likewise, from one seed."""
    decodes(model, do_sample=True, temperature=1.3)


def beam_search(model: Any) -> None:
    """Likewise, with three beams."""
    decodes(model, num_beams=3)


def beam_sampling(model: Any) -> None:
    """Likewise, with three beams from one seed, and two of them returned."""
    decodes(model, num_beams=3, do_sample=True, num_return_sequences=2)


def several_sequences(model: Any) -> None:
    """Likewise, three answers to one prompt from one seed."""
    decodes(model, do_sample=True, num_return_sequences=3)


def padded_batch(model: Any) -> None:
    """Each row is its own solo run."""
    lengths, (ids, mask) = (7, 33, 60), prompts(7, 33, 60)
    same(ruled(model, policies.full(), ids, attention_mask=mask, **ASK), stock(model, ids, attention_mask=mask, **ASK))
    batch = ruled(model, EVICTING, ids, attention_mask=mask, **ASK)
    for row, length in enumerate(lengths):
        same(batch[row, -NEW:], ruled(model, EVICTING, ids[row : row + 1, -length:], **ASK)[0, -NEW:])


def early_end(model: Any) -> None:
    """A row that meets its end leaves the others as they are."""
    ids = prompts(60, 60)[0]
    plain = ruled(model, EVICTING, ids, **ASK)
    first, second = plain[:, 60:].tolist()
    end = next(token for token in first if token not in second)
    ended = ruled(model, EVICTING, ids, eos_token_id=end, **ASK)
    same(ended[1], plain[1])
    assert not ended[0, 61 + first.index(end) :].any()


def streamed(model: Any) -> None:
    """The streamer gets every token, prompt included."""

    class Letters:
        def decode(self, tokens: Any, **_how: Any) -> str:
            return "".join(f"{int(token)} " for token in tokens)

    ids, told = prompts(60)[0], io.StringIO()
    streamer: Any = TextStreamer(Letters())  # type: ignore[arg-type]
    streamer.on_finalized_text = lambda text, **_how: told.write(text)
    found = ruled(model, EVICTING, ids, streamer=streamer, **ASK)
    assert [*map(int, told.getvalue().split())] == found[0].tolist()


def chunked(model: Any) -> None:
    """A prompt in pieces is routed once, at its end: with a score of keys alone, what is kept is the same."""
    ids, kept = prompts(60)[0], []
    for chunk in ({}, {"prefill_chunk_size": 25}):
        with qevict.attach(model, attrs.evolve(EVICTING, scorer=KeyNorm())) as session:
            cache = session.cache()
            session.generate(ids, cache=cache, **ASK, **chunk)
        kept.append([cache.kept_positions(layer) for layer in cache.ruled_layers])
    assert kept[0] == kept[1]
    same(ruled(model, policies.full(), ids, prefill_chunk_size=25, **ASK), stock(model, ids, **ASK))


def continued(model: Any) -> None:
    """From a filled cache, given what is new or the whole text."""
    ids = prompts(60)[0]
    expected = stock(model, ids, **ASK)
    with qevict.attach(model, policies.full()) as session:
        cache = session.prefill(ids[:, :50])
        whole = model.generate(ids, **ASK, **{CACHE_ARGUMENT: cache.fork()})
        new = session.generate(ids[:, 50:], cache=cache, attention_mask=torch.ones(1, 60), **ASK)
    same(whole, expected)
    same(new[:, 10:], expected[:, 60:])


def chat(model: Any) -> None:
    """Three turns; the cache goes on, and holds what one text of all turns would have given it."""
    ids = prompts(66)[0]
    with qevict.attach(model, policies.full()) as session:
        cache, text = session.cache(), ids[:, :0]
        for turn in ids.split(22, dim=1):
            text = torch.cat((text, turn), dim=1)
            new = text[:, cache.get_seq_length() :]
            answer = session.generate(new, cache=cache, attention_mask=torch.ones_like(text), **ASK)[:, -NEW:]
            same(answer, stock(model, text, attention_mask=torch.ones_like(text), **ASK)[:, -NEW:])
            text = torch.cat((text, answer), dim=1)
    with qevict.attach(model, EVICTING) as session:
        cache = session.cache()
        for turn in ids.split(22, dim=1):
            seen = cache.get_seq_length() + turn.shape[1]
            session.generate(turn, cache=cache, attention_mask=torch.ones(1, seen), **ASK)
        assert cache.get_seq_length() == 66 + 3 * (NEW - 1)


def piped(model: Any) -> None:
    """`pipeline("text-generation")`, given the cache of a session."""
    with qevict.attach(model, policies.full()) as session:
        found = text_pipeline(model, **{CACHE_ARGUMENT: session.cache()})
    assert found == text_pipeline(model)


def adapted(model: Any) -> None:
    """A model with LoRA adapters around it."""
    decodes(with_lora(copy.deepcopy(model)))


def prompt_lookup(model: Any) -> None:
    """Refused before the first token."""
    ruled(model, EVICTING, prompts(60)[0], prompt_lookup_num_tokens=3, **ASK)


def assisted(model: Any) -> None:
    """Refused before the first token."""
    ruled(model, EVICTING, prompts(60)[0], assistant_model=model, **ASK)


def carried_on(model: Any, carry: Callable[[Any], Any]) -> None:
    """A cache that went through an operation goes on bit for bit, in every state; the first one is left alone."""
    ids, mask = prompts(30, 60)
    for policy in (EVICTING, ENCODING):
        with qevict.attach(model, policy) as session, torch.no_grad():
            cache = session.prefill(ids, mask)
            for step in range(3):
                forward(model, cache, ids[:, step : step + 1])
            other, before = carry(cache), cache.nbytes()
            logits = [forward(model, other, ids[:, step : step + 1]) for step in range(NEW)]
            assert cache.nbytes() == before
            for step, expected in enumerate(logits):
                assert torch.equal(forward(model, cache, ids[:, step : step + 1]), expected)


@torch.no_grad()
def forward(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Logits of one more forward of the rows of 30 and 60 tokens."""
    seen = cache.get_seq_length() + ids.shape[1]
    mask = torch.ones(2, seen, dtype=torch.long)
    mask[0, :30] = 0
    positions = (mask.cumsum(1) - 1)[:, -ids.shape[1] :]
    logits: Tensor = model(ids, attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache}).logits
    return logits


def forked(model: Any) -> None:
    """A copy goes on bit for bit, and leaves the first cache alone."""
    carried_on(model, lambda cache: copy.deepcopy(cache.fork()))


def pickled(model: Any) -> None:
    """Likewise, through pickle."""
    carried_on(model, lambda cache: pickle.loads(pickle.dumps(cache)))  # noqa: S301 - its own bytes


def saved(model: Any) -> None:
    """Likewise, through a file."""

    def through_a_file(cache: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            cache.save(Path(folder) / "cache.safetensors")
            return qevict.Cache.load(Path(folder) / "cache.safetensors", model)

    carried_on(model, through_a_file)


def rows_picked(model: Any) -> None:
    """Rows repeated, reordered and selected go on as they would have in their old places."""
    ids, mask = prompts(60, 60, 60)
    for policy in (EVICTING, ENCODING):
        with qevict.attach(model, policy) as session, torch.no_grad():
            plain = session.prefill(ids, mask)
            moved = plain.fork()
            moved.batch_repeat_interleave(2)
            moved.reorder_cache(torch.tensor([5, 0, 1, 2, 4, 3]))
            moved.batch_select_indices(torch.tensor([0, 2, 4, 5]))
            places = torch.tensor([2, 0, 2, 1])
            for step in range(NEW):
                expected = model(ids[:, step : step + 1], **{CACHE_ARGUMENT: plain}).logits[places]
                found = model(ids[places, step : step + 1], **{CACHE_ARGUMENT: moved}).logits
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def cropped(model: Any) -> None:
    """Tokens taken back are as if they had never come (where layers slide, in a text shorter than their window)."""
    ids = prompts(20)[0]
    for policy in (policies.full(), policies.sinks_recent("60 %", recent_tokens=8)):
        with qevict.attach(model, policy) as session, torch.no_grad():
            cache, never = session.prefill(ids), session.prefill(ids)
            model(ids[:, :5], **{CACHE_ARGUMENT: cache})
            cache.crop(-3)
            model(ids[:, :2], **{CACHE_ARGUMENT: never})
            found, expected = (model(ids[:, 5:6], **{CACHE_ARGUMENT: own}).logits for own in (cache, never))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def cropped_after_scores(model: Any) -> None:
    """A scorer that adds up attention cannot take tokens back."""
    with qevict.attach(model, EVICTING) as session:
        session.prefill(prompts(20)[0]).crop(-3)


def cropped_behind_a_window(model: Any) -> None:
    """A layer that slides has dropped tokens that would have to come back."""
    with qevict.attach(model, policies.full()) as session:
        session.prefill(prompts(60)[0]).crop(-3)


def emptied(model: Any) -> None:
    """A cache that was reset is as new."""
    ids = prompts(60)[0]
    with qevict.attach(model, EVICTING) as session:
        cache = session.prefill(prompts(40, seed=3)[0])
        cache.reset()
        same(session.generate(ids, cache=cache, **ASK), ruled(model, EVICTING, ids, **ASK))


def half_precision(model: Any) -> None:
    """Weights of 16 bits, and autocast: the logits of the stock cache, bit for bit; under a budget, of its dtype."""
    ids = prompts(40)[0]
    for dtype in (torch.bfloat16, torch.float16, None):
        own = model if dtype is None else copy.deepcopy(model).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None), torch.no_grad():
            caches: list[Any] = [DynamicCache(config=model.config)]
            with qevict.attach(own, policies.full()) as session:
                caches += [session.cache(), qevict.Cache(own, ENCODING)]
                for piece in ids.split((32, 1, 1, 1, 5), dim=1):
                    stock_logits, full, coded = (own(piece, **{CACHE_ARGUMENT: cache}).logits for cache in caches)
                    same(full, stock_logits)
                    assert coded.dtype == stock_logits.dtype
                    assert coded.isfinite().all()


@attrs.frozen
class Way:
    """A column of the page's cells.

    Attributes:
        name: for users.
        run: raises what is wrong.
        refused: it may be refused for all families.
        sliding: it may be refused where layers slide.
    """

    name: str
    run: Callable[[Any], None]
    refused: bool = False
    sliding: bool = False


DECODING = (
    Way("greedy", greedy),
    Way("sampling", sampling),
    Way("beam search", beam_search),
    Way("beam sampling", beam_sampling),
    Way("several sequences (`num_return_sequences`)", several_sequences),
    Way("padded batch, rows as alone", padded_batch),
    Way("rows that end early", early_end),
    Way("streaming (`TextStreamer`)", streamed),
    Way("prompt in chunks (`prefill_chunk_size`)", chunked),
    Way("going on from a filled cache", continued),
    Way("chat of three turns", chat),
    Way('`pipeline("text-generation")`', piped),
    Way("PEFT (LoRA)", adapted),
    Way("bf16, fp16, autocast", half_precision),
    Way("prompt lookup decoding", prompt_lookup, refused=True),
    Way("assisted decoding", assisted, refused=True),
)
STATE = (
    Way("deepcopy, `fork`", forked),
    Way("pickle", pickled),
    Way("`save` and `load`", saved),
    Way("rows repeated, selected, reordered", rows_picked),
    Way("`crop`, scorers without memory", cropped),
    Way("`crop`, scorers that add up", cropped_after_scores, refused=True),
    Way("`crop`, a text longer than a window", cropped_behind_a_window, sliding=True),
    Way("`reset`", emptied),
)
WAYS = {way.run.__name__: way for way in (*DECODING, *STATE)}

TITLES = {
    "llama": "Llama", "mistral": "Mistral", "mistral_sliding": "Mistral, sliding", "qwen2": "Qwen2",
    "qwen2_sliding": "Qwen2, `max_window_layers`", "qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE", "phi3": "Phi-3",
    "phi3_partial": "Phi-3, partial RoPE", "gemma2": "Gemma-2", "gemma3": "Gemma-3", "gpt_oss": "GPT-OSS",
}  # fmt: skip

SLIDING = {"mistral_sliding", "qwen2_sliding", "gemma2", "gemma3", "gpt_oss"}
DEMANDED = {
    (family, name)
    for family in FAMILIES
    for name, way in WAYS.items()
    if not way.refused and not (way.sliding and family in SLIDING)
}
"""Cells that must say "works"."""


def outcome(family: str, name: str) -> str:
    """Run a cell: "works", or the message of the refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.NothingRuledWarning)
        try:
            WAYS[name].run(model_of(family))
        except (errors.UnsupportedOperationError, errors.UnsupportedModelError) as error:
            return str(error)
    return "works"


HEAD = """# Compatibility

What works with which family of models, under transformers {versions}.
The tables are what `tests/hf/test_compatibility.py` finds; `python -m tests.hf.compatibility` writes this page.
The models are small and random, with all that marks their family: grouped heads, norms of queries and keys, caps, sinks
as parameters, experts, sliding windows.
Gemma-2 and GPT-OSS, which have no other, run under `eager`, all others under `sdpa`; the ladder of exactness runs under
both.

Layers with a sliding window stay the library's own, whatever the policy; of "Mistral, sliding" nothing is ruled.
In a batch, later turns of unequal length are refused with such layers: pads would fill up their windows.
RoPE of type default, linear, llama3 and yarn serves all policies; with dynamic and longrope, whose frequencies change
with the length of a text, policies that quantize are refused, and kept keys stay as they were written.
Also refused when attached, each with its reason: multi-head latent attention, encoder-decoder models, shared key/value
layers, linear and chunked attention, attention that is not causal, training mode.
"""


def page(found: dict[tuple[str, str], str]) -> str:
    """The page, from the outcomes of all cells."""
    from qevict.hf.compat import INSTALLED, OLDEST

    parts = [HEAD.format(versions=f"{INSTALLED} (and from {OLDEST} on)")]
    for title, ways in (("Decoding", DECODING), ("State", STATE)):
        parts += [
            f"\n## {title}\n",
            f"| | {' | '.join(TITLES.values())} | test |",
            f"|---|{'---|' * (len(TITLES) + 1)}",
        ]
        for way in ways:
            name = way.run.__name__
            cells = ["works" if found[family, name] == "works" else "refused" for family in TITLES]
            parts.append(f"| {way.name} | {' | '.join(cells)} | `test_cell[{name}-…]` |")
    parts.append("\n## What the words claim\n")
    parts += [f"* {way.name}: {(way.run.__doc__ or '').strip()}" for way in WAYS.values()]
    parts.append("\n## Refusals\n")
    for name, way in WAYS.items():
        for message in dict.fromkeys(found[family, name] for family in TITLES):
            if message != "works":
                parts.append(f"* {way.name}: {message}")
    return "\n".join(parts) + "\n"


def told(family: str, name: str) -> str:
    """What the page says of a cell: "works", or all refusals of its way."""
    text = PAGE.read_text("utf-8")
    title = re.escape(WAYS[name].name)
    row = re.search(rf"^\| {title} \| (.*) \| `test_cell\[{name}-…\]` \|$", text, re.MULTILINE)
    assert row, f"the page has no row {name}"
    cell = row[1].split(" | ")[[*TITLES].index(family)]
    messages = re.findall(rf"^\* {title}: (.*)$", text.split("## Refusals")[1], re.MULTILINE)
    return cell if cell == "works" else "\n".join(messages)


if __name__ == "__main__":
    PAGE.write_text(page({(family, name): outcome(family, name) for family in FAMILIES for name in WAYS}), "utf-8")
