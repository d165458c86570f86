"""Real weights: padded batches, chunks and turns on SmolLM2, layers of two kinds on Gemma-3.

The texts are such that no ranking is close: at every border between tiers, scores lie apart by at least 3e-4 of
themselves, a hundred times what rounding does to them. So kept sets must be equal, not merely alike. A code may turn
where a key lies on its edge, which is why logits behind codes get a tolerance of their own.
"""

import copy
import gc
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from tests.oracle import Held, forwards, held
from torch import Tensor
from transformers import DynamicCache

import qevict
from qevict import policies
from qevict.bench.models import GEMMA3, SMOLLM2, load
from qevict.bench.needles import load_haystack
from qevict.bench.prompts import answer_ids, chat_ids, next_turn
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.hf.reading import read_into
from qevict.policy import Policy
from qevict.testing.footprint import reachable_bytes

pytestmark = pytest.mark.real

TEXTS = {"ships_log": 60, "travel_column": 150, "beekeeping": 290, "fairy_tale": 450}
NEW = 10
ASK: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_logits": True,
}
PRESETS = pytest.mark.parametrize(
    ("policy", "tolerance"),
    [(policies.evict_only("50 %"), 3e-4), (policies.qevict("50 %"), 2e-2)],
    ids=["evict_only", "qevict"],
)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    return load(SMOLLM2)


def text_ids(tokenizer: Any, name: str) -> Tensor:
    """The first tokens of a text, ``[1, tokens]``."""
    return torch.tensor([tokenizer(load_haystack(name))["input_ids"][: TEXTS[name]]])


def places(cache: Any, row: int) -> list[list[tuple[int, int]]]:
    """Windows of a row and their tiers, by layer."""
    found = []
    for layer in cache.engine.layers:
        records = layer.records
        own = records.lane_of() == row
        found.append(sorted(zip(records.window[own].tolist(), records.place[own].tolist(), strict=True)))
    return found


@torch.no_grad()
def go_on(model: Any, cache: Any, new: Tensor) -> Tensor:
    """Logits behind each token, given in one turn."""
    logits: Tensor = model(new, **{CACHE_ARGUMENT: cache}).logits[0]
    return logits


def assert_compressed(cache: Any, row: int) -> None:
    """In every layer, something that a row might have kept in full was given up or encoded, and something was kept."""
    policy, tokens = cache.policy, cache.engine.clock.tokens[row]
    aged = (tokens - policy.sink_tokens - policy.recent_tokens - policy.period_tokens) // policy.window_tokens
    for layer in places(cache, row):
        kept = [place for window, place in layer if window < aged]
        assert kept
        assert kept.count(0) < aged


@PRESETS
def test_rows_of_a_padded_batch_equal_their_solo_runs(
    smollm2: tuple[Any, Any], policy: Policy, tolerance: float
) -> None:
    model, tokenizer = smollm2
    rows, widest = [text_ids(tokenizer, name) for name in TEXTS], max(TEXTS.values())
    ids = torch.cat([F.pad(row, (widest - row.shape[1], 0)) for row in rows])
    mask = torch.arange(widest) >= widest - torch.tensor([[row.shape[1]] for row in rows])
    with qevict.attach(model, policy) as session:
        together = session.cache()
        batch = session.generate(ids, attention_mask=mask.long(), cache=together, **ASK)
        for index, row in enumerate(rows):
            alone = session.cache()
            solo = session.generate(row, cache=alone, **ASK)
            assert torch.equal(batch.sequences[index, -NEW:], solo.sequences[0, -NEW:])
            assert places(together, index) == places(alone, 0)
            for own, theirs in zip(batch.logits, solo.logits, strict=True):
                torch.testing.assert_close(own[index], theirs[0], atol=tolerance, rtol=0)
            if row.shape[1] > 100:  # the shortest row is all protected, or nearly
                assert_compressed(alone, 0)


@PRESETS
def test_a_prompt_in_chunks_is_the_prompt_at_once(smollm2: tuple[Any, Any], policy: Policy, tolerance: float) -> None:
    model, tokenizer = smollm2
    ids, question = text_ids(tokenizer, "beekeeping"), torch.tensor([tokenizer("\n\nIn short,")["input_ids"]])
    with qevict.attach(model, policy) as session:
        once, pieces = session.prefill(ids), session.prefill(ids, chunk_tokens=64)
        assert places(once, 0) == places(pieces, 0)
        assert_compressed(once, 0)
        own, theirs = go_on(model, pieces, question), go_on(model, once, question)
        torch.testing.assert_close(own, theirs, atol=tolerance, rtol=0)
        whole = session.generate(ids, **ASK)
        chunked = session.generate(ids, prefill_chunk_size=100, **ASK)
    assert torch.equal(whole.sequences, chunked.sequences)
    for own, theirs in zip(chunked.logits, whole.logits, strict=True):
        torch.testing.assert_close(own, theirs, atol=tolerance, rtol=0)


def chat(tokenizer: Any) -> list[Tensor]:
    """Three turns: a text with a question, and two more questions behind the replies."""
    text = " ".join(load_haystack("wood_stove").split()[:170])
    turns = [
        chat_ids(tokenizer, f"{text}\n\nWhere must the stove stand?"),
        answer_ids(tokenizer, "On a level floor that can carry its weight.")
        + next_turn(tokenizer, "And what should lie beneath it?"),
        answer_ids(tokenizer, "A sheet of slate.") + next_turn(tokenizer, "Who else knew most of this?"),
    ]
    return [torch.tensor([turn]) for turn in turns]


@torch.no_grad()
def listen(model: Any, cache: Any, turns: list[Tensor], new: int) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    """Forwards of the turns and then of single, best tokens: their tokens, their logits, what was held before each."""
    pieces: list[Tensor] = []
    logits: list[Tensor] = []
    watch: list[dict[int, Held]] = [{}]
    for turn in range(len(turns) + new):
        pieces.append(turns[turn] if turn < len(turns) else logits[-1][:, -1:].argmax(-1))
        logits.append(model(pieces[-1], **{CACHE_ARGUMENT: cache}).logits)
        watch.append({layer: held(cache, model, layer) for layer in cache.ruled_layers})
        assert_compressed(cache, 0)
        assert cache.report().overshoot_bytes == 0
    return pieces, logits, watch[:-1]


@PRESETS
def test_three_turns_announced_as_one_prompt_are_one_turn(
    smollm2: tuple[Any, Any], policy: Policy, tolerance: float
) -> None:
    model, turns = smollm2[0], chat(smollm2[1])
    with qevict.attach(model, policy) as session:
        once, thrice = session.cache(), session.cache()
        for cache, pieces in ((once, [torch.cat(turns, dim=1)]), (thrice, turns)):
            cache.expect(sum(turn.shape[1] for turn in turns))
            with torch.no_grad():
                for piece in pieces:
                    logits = model(piece, **{CACHE_ARGUMENT: cache}).logits[:, -1]
            assert_compressed(cache, 0)
            new = logits.argmax(-1)[:, None]
        assert places(once, 0) == places(thrice, 0)
        own = session.generate(new, cache=thrice, **ASK)
        theirs = session.generate(new, cache=once, **ASK)
    assert torch.equal(own.sequences, theirs.sequences)
    for ours, expected in zip(own.logits, theirs.logits, strict=True):
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("policy", [policies.evict_only("50 %"), policies.qevict("50 %")], ids=["evict_only", "qevict"])
def test_every_turn_attends_to_what_the_turns_before_it_left(smollm2: tuple[Any, Any], policy: Policy) -> None:
    """Not announced, the first turn is the prompt; each later turn finds it compressed and ends with an event."""
    model, turns = smollm2[0], chat(smollm2[1])
    with qevict.attach(model, policy) as session:
        pieces, logits, watch = listen(model, session.cache(), turns, new=9)
    encodes = len(policy.tiers) > 1
    for own, theirs in zip(logits, forwards(model, pieces, watch, patch=encodes), strict=True):
        torch.testing.assert_close(own, theirs, atol=3e-4, rtol=0)


PROMPT, WINDOW, FOLLOWING = 1500, 512, 40
GLOBAL = (5, 11, 17)
CAPITALS = "\n\nGermany: Berlin. Italy: Rome. Spain: Madrid. France:"


@attrs.frozen(eq=False)
class Gemma:
    """Gemma-3-270M, a text, and what a stock cache makes of it.

    Attributes:
        model: the model.
        tokenizer: its tokenizer.
        prompt: ``[1, PROMPT]``.
        following: the tokens behind it, ``[1, FOLLOWING]``.
        read: a stock cache that has read the prompt.
        logits: of the following tokens, ``[FOLLOWING, vocabulary]``.
    """

    model: Any
    tokenizer: Any
    prompt: Tensor
    following: Tensor
    read: Any
    logits: Tensor

    @property
    def nats(self) -> float:
        """Mean loss of the following tokens with a stock cache."""
        return float(lost(self.logits, self.following))


def lost(logits: Tensor, following: Tensor) -> Tensor:
    """Mean loss, in nats, of the tokens behind the first."""
    return F.cross_entropy(logits[:-1], following[0, 1:])


@pytest.fixture(scope="module")
def gemma() -> Gemma:
    model, tokenizer = load(GEMMA3)
    text = f"{load_haystack('ships_log')}\n\n{load_haystack('fairy_tale')}"
    ids = torch.tensor([tokenizer(text)["input_ids"][: PROMPT + FOLLOWING]])
    prompt, following = ids[:, :PROMPT], ids[:, PROMPT:]
    read = DynamicCache(config=model.config)
    read_into(read, model, prompt, None)
    return Gemma(model, tokenizer, prompt, following, read, go_on(model, copy.deepcopy(read), following))


def assert_bytes_are_right(cache: Any) -> None:
    """All bytes are told; those of the global layers keep the budget, which is of theirs alone."""
    report = cache.report()
    local = report.bytes_by_kind["layers not ruled"]
    assert report.ruled_layers == len(GLOBAL)
    assert report.exact_bytes == cache.nbytes() == reachable_bytes(cache) == sum(report.bytes_by_kind.values())
    assert local == reachable_bytes(cache.library_layers)
    assert report.budget_bytes == int(0.2 * report.tokens[0] * len(GLOBAL) * 2 * 256 * 4)
    assert report.exact_bytes - local <= report.budget_bytes
    assert report.overshoot_bytes == 0


def test_gemma_keeps_its_local_layers_and_compresses_the_global_ones(gemma: Gemma) -> None:
    with qevict.attach(gemma.model, policies.qevict("20 %")) as session:
        cache = session.prefill(gemma.prompt)
        assert cache.ruled_layers == GLOBAL
        own: Any
        for index, (own, stock) in enumerate(zip(cache.layers, gemma.read.layers, strict=True)):
            if index in GLOBAL:
                assert len(cache.kept_positions(index)[0]) < PROMPT
                continue
            assert type(own) is type(stock)
            assert torch.equal(own.keys, stock.keys)
            assert torch.equal(own.values, stock.values)
            assert own.keys.shape[2] == WINDOW - 1
        assert cache.report().windows["int2"] > 0
        assert_compressed(cache, 0)
        gc.collect()
        assert_bytes_are_right(cache)
        question = gemma.tokenizer(CAPITALS, add_special_tokens=False, return_tensors="pt").input_ids
        said = session.generate(question, cache=cache.fork(), max_new_tokens=2, do_sample=False)
        assert gemma.tokenizer.decode(said[0]) == f"{CAPITALS} Paris."
        logits = go_on(gemma.model, cache, gemma.following)
        assert cache.get_seq_length() == PROMPT + FOLLOWING
        assert_bytes_are_right(cache)
    nats = float(lost(logits, gemma.following))
    assert nats < gemma.nats + 0.1, (
        f"{nats:.2f} nats a token behind the compressed prompt, {gemma.nats:.2f} behind it all"
    )


def test_gemma_with_room_for_everything_is_the_stock_cache(gemma: Gemma) -> None:
    policy = attrs.evolve(policies.evict_only("20 %"), budget=None)
    with qevict.attach(gemma.model, policy) as session:
        cache = session.prefill(gemma.prompt)
        assert all(cache.kept_positions(index) == [[*range(PROMPT)]] for index in GLOBAL)
        logits = go_on(gemma.model, cache, gemma.following)
    torch.testing.assert_close(logits, gemma.logits, atol=1e-4, rtol=0)
