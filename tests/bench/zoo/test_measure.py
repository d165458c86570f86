"""One reading serves all policies, both modes and many rows at once; what is told is what a cache alone would tell."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tests.chat import save_chat_model

import qevict
from qevict import policies
from qevict.bench.examination import reply_nats
from qevict.bench.models import load
from qevict.bench.zoo import measure as measuring
from qevict.bench.zoo.field import Cell, Level, Run, known_entrants, runs
from qevict.bench.zoo.interim import Interim, done
from qevict.bench.zoo.measure import Outcome, Score, measure
from qevict.bench.zoo.plan import Schedule, visits
from qevict.bench.zoo.prompts import SEEN, UNSEEN, Piece, Prompt, read
from qevict.bench.zoo.record import rows_of
from qevict.bench.zoo.tasks import RETRIEVAL, TASKS
from qevict.bench.zoo.work import in_parallel, in_turn
from qevict.errors import InputError
from qevict.policy import Policy

PROMPT = Prompt(
    "any",
    "900",
    3,
    "The dog is called Biscuit. " * 8,
    "Who?",
    (Piece("It is", scored=False), Piece(" Biscuit", scored=True)),
)
POLICIES = {"full": policies.full(), "QEvict": policies.qevict("40 %"), "evict-only": policies.evict_only("30 %")}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    model, tokenizer = load(save_chat_model(tmp_path_factory.mktemp("chat")))
    with qevict.attach(model, policies.full()) as session:
        yield session, tokenizer


def run(name: str, policy: Policy, mode: str) -> Run:
    return Run(name, Cell("900", mode, None), policy)


def every_run() -> list[Run]:
    return [run(name, policy, mode) for mode in (UNSEEN, SEEN) for name, policy in POLICIES.items()]


def test_scores_are_those_of_a_cache_that_reads_for_itself(chat: tuple[Any, Any]) -> None:
    session, tokenizer = chat
    outcome, reading = measure(session, tokenizer, PROMPT, every_run()), read(tokenizer, PROMPT)
    assert outcome.prompt == "any/900/3"
    assert outcome.tokens == reading.cuts
    ids = torch.tensor([reading.ids])
    for own in every_run():
        cut = reading.cuts[own.cell.mode]
        with qevict.attach(session.model, own.policy) as alone:
            cache = alone.prefill(ids[:, :cut])
            report = cache.report()
            nats = reply_nats(session.model, cache, ids[:, cut : cut + 1], list(reading.ids[cut + 1 :]))
        score = outcome.scores[own.key]
        assert score.nats == pytest.approx(float(nats[-len(reading.scored) :].mean()), abs=1e-3), own.key
        assert score.share == report.exact_bytes / report.full_bytes
    assert len({round(score.nats, 4) for score in outcome.scores.values()}) > 3, "blind to policy and mode"


def test_batches_and_single_policies_tell_the_same(chat: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    together = measure(*chat, PROMPT, every_run())
    monkeypatch.setattr(measuring, "_TOGETHER", 1)
    single = measure(*chat, PROMPT, every_run())
    for key, score in together.scores.items():
        assert single.scores[key].nats == pytest.approx(score.nats, abs=1e-4)


def test_a_policy_that_does_not_fit_is_named_and_the_others_go_on(chat: tuple[Any, Any]) -> None:
    from qevict_baselines.kvzip import kvzip

    outcome = measure(*chat, PROMPT, [run("KVzip", kvzip("40 %"), UNSEEN), run("full", policies.full(), UNSEEN)])
    assert list(outcome.scores) == ["unseen/full/"]
    assert "repeat" in outcome.refused["unseen/KVzip/"]


def test_exact_means_every_token_that_counts(chat: tuple[Any, Any]) -> None:
    session, tokenizer = chat
    ids = torch.tensor([read(tokenizer, PROMPT).ids])
    [outcome] = [measure(session, tokenizer, PROMPT, [run("full", policies.full(), SEEN)])]
    with torch.no_grad():
        first = session.model(ids).logits[0].argmax(dim=-1)
    scored = list(read(tokenizer, PROMPT).scored)
    wanted = all(int(first[place - 1]) == int(ids[0, place]) for place in scored)
    assert outcome.scores["seen/full/"].exact == wanted


@pytest.mark.slow
def test_workers_tell_what_this_process_tells(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path)
    prompts = [attrs.evolve(PROMPT, task=task, place=0) for task in ("a", "b", "c")]
    level = Level(("plain",), "900", UNSEEN, ("40 %",), 1)
    planned = visits(prompts, (level,), lambda level: runs(known_entrants()[0], level), {})
    deadline = time.monotonic() + 600
    alone = list(in_turn(Schedule(list(planned), deadline, 1), folder))
    together = list(in_parallel(Schedule(list(planned), deadline, 2), folder))
    assert len(alone) == 3
    assert {own.prompt: own.scores for own in together} == {own.prompt: own.scores for own in alone}


OUTCOME = Outcome("needle/900/2", {"unseen/full/": Score(0.5, True, 1.06)}, {"seen/x/": "why"}, {"unseen": 9}, 1.0, 2.0)
FACTS = {"model": "m", "tasks": ["needle"]}


def test_a_stopped_run_is_continued(tmp_path: Path) -> None:
    interim = Interim(tmp_path / "zoo.jsonl")
    interim.begin(FACTS)
    interim.add(OUTCOME)
    interim.add(attrs.evolve(OUTCOME, prompt="needle/900/5"))
    with interim.path.open("a", encoding="utf-8") as file:
        file.write('{"prompt": "needle/900/7", "sco')
    found = interim.read(FACTS)
    assert found == [OUTCOME, attrs.evolve(OUTCOME, prompt="needle/900/5")]
    assert done(found)["needle/900/2"] == {"unseen/full/", "seen/x/"}
    interim.add(OUTCOME)
    assert len(interim.read(FACTS)) == 3, "the line that was cut off is in the way"
    for line in interim.path.read_text("utf-8").splitlines():
        json.loads(line)


def test_what_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    interim = Interim(tmp_path / "zoo.jsonl")
    with pytest.raises(InputError, match="leave --continue out"):
        interim.read(FACTS)
    interim.begin(FACTS)
    with pytest.raises(InputError, match="model: 'm' then, 'other' now"):
        interim.read({**FACTS, "model": "other"})


def test_rows_gather_prompts_in_order() -> None:
    later = attrs.evolve(OUTCOME, prompt="needle/900/1", scores={"unseen/full/": Score(0.25, False, 1.0)})
    own, other = rows_of([OUTCOME, later, attrs.evolve(later, prompt="perplexity/900/0")], ["perplexity", "needle"])
    assert (own.task, other.task) == ("perplexity", "needle")
    assert (other.name, other.budget, other.places, other.nats, other.exact) == (
        "full",
        None,
        (1, 2),
        (0.25, 0.5),
        (False, True),
    )
    assert other.share == pytest.approx(1.03)


@pytest.mark.real
def test_real_the_full_cache_knows_the_needle_and_qevict_loses_something() -> None:
    model, tokenizer = load()
    entrants = [entrant for entrant in known_entrants()[0] if entrant.name in {"full", "QEvict"}]
    level = Level(("candidate",), "900", UNSEEN, ("10 %",), 2)
    losses = []
    with qevict.attach(model, policies.full()) as session:
        for prompt in TASKS[RETRIEVAL[0]]("900", 2):
            scores = measure(session, tokenizer, prompt, list(runs(entrants, level))).scores
            assert scores["unseen/full/"].exact
            assert scores["unseen/QEvict/10 %"].share <= 0.1
            losses.append(scores["unseen/QEvict/10 %"].nats - scores["unseen/full/"].nats)
    assert sum(losses) / 2 > 1
