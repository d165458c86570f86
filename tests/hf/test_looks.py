"""Sampled queries, of the prompt and of each period, against the probabilities of a full run."""

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import pytest
import torch
from tests.oracle import prompts, tiny
from torch import Tensor

import qevict
from qevict import policies
from qevict.backends.reference import ReferenceAttention
from qevict.contracts.backend import Attended, AttentionBackend, Query, View
from qevict.contracts.scorer import State
from qevict.contracts.values import Need, Observation
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy
from qevict.scorers.cumulative import CumulativeAttention
from qevict.shapes import Mass

SINKS, WINDOW, PERIOD = 5, 8, 8
Forwards = Sequence[Sequence[int]]
"""Tokens of each row, forward after forward, behind the prompt."""

STEPS: Forwards = [[1, 1]] * 20
OUT_OF_PHASE: Forwards = [[1, 1]] * 3 + [[5, 2]] + [[1, 1]] * 6 + [[0, 3], [20, 4]] + [[1, 1]] * 10


def keeping_all(min_tokens: int = 0, **looks: Any) -> Policy:
    """Nothing is given up, so that every mass is one of full attention."""
    policy = attrs.evolve(policies.evict_only("50 %"), budget=None, min_tokens=min_tokens)
    return attrs.evolve(policy, scorer=CumulativeAttention(**looks))


@attrs.frozen(eq=False)
class Text:
    """Rows that a model read: the true tokens of each, and what the scorer made of them by layer and row."""

    rows: list[Tensor]
    scores: list[list[dict[int, float]]]


@torch.no_grad()
def read(model: Any, policy: Policy, lengths: Sequence[int], forwards: Forwards = (), chunk: int | None = None) -> Text:
    """Prompts, then forwards that are padded on the left to the longest of their rows."""
    ids, mask = prompts(*lengths)
    with qevict.attach(model, policy) as session:
        cache = session.prefill(ids, mask, chunk_tokens=chunk)
        for number, counts in enumerate(forwards):
            new, real = prompts(*[max(count, 1) for count in counts], seed=number)
            new, real = (each * (torch.tensor(counts) > 0)[:, None] for each in (new, real))
            ids, mask = torch.cat((ids, new), 1), torch.cat((mask, real), 1)
            positions = (mask.cumsum(1) - 1)[:, -new.shape[1] :].clamp(min=0)
            model(new, attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache})
    rows = [row[keep > 0] for row, keep in zip(ids, mask, strict=True)]
    return Text(rows, [scores_of(layer) for layer in cache.engine.layers])


def scores_of(layer: Any) -> list[dict[int, float]]:
    """Accumulated mass by window, row by row."""
    records, rows = layer.records, [dict[int, float]() for _ in range(layer.lanes)]
    lines = zip(records.lane_of().tolist(), records.window.tolist(), records.state["mass"].tolist(), strict=True)
    for lane, window, mass in lines:
        rows[lane][window] = mass
    return rows


def weights(policy: Policy, prompt: int, forwards: Sequence[int]) -> list[float]:
    """How much each query of a row counts, by its position; written without the engine."""
    scorer: Any = policy.scorer
    last, stride, observed = scorer.prompt_queries or prompt, scorer.prompt_stride, scorer.observe_tokens
    found = [stride * (prompt - q <= last and (prompt - 1 - q) % stride == 0) for q in range(prompt)]
    since = 0
    for count in forwards:
        before, after = len(found), len(found) + count
        due = since + count >= PERIOD or before < policy.min_tokens <= after
        event = before - since + PERIOD
        if before < policy.min_tokens:
            event = min(event, policy.min_tokens)
        event = after if due else event
        if observed is None:
            found += [1] * count
        else:
            found += [PERIOD / observed * (event - observed <= q < event) for q in range(before, after)]
        since = 0 if due else since + count
    return [float(each) for each in found]


@torch.no_grad()
def check(model: Any, policy: Policy, text: Text, lengths: Sequence[int], forwards: Forwards = ()) -> None:
    """Every window's score is its weighted column of a full run's probabilities."""
    for number, row in enumerate(text.rows):
        counted = torch.tensor(weights(policy, lengths[number], [counts[number] for counts in forwards]))
        assert len(counted) == len(row)
        attentions = model(row[None], output_attentions=True).attentions
        for attention, scores in zip(attentions, text.scores, strict=True):
            tokens = torch.einsum("hqt,q->t", attention[0], counted) / attention.shape[1]
            for window, score in scores[number].items():
                first = SINKS + WINDOW * window
                assert score == pytest.approx(float(tokens[first : first + WINDOW].sum()), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("looks", [{"prompt_stride": 3}, {"prompt_stride": 50}, {"prompt_queries": 20}])
@pytest.mark.parametrize("lengths", [(90,), (37, 90)], ids=["solo", "padded"])
def test_every_nth_prompt_query_counts_for_n(lengths: tuple[int, ...], looks: dict[str, int]) -> None:
    model, policy = tiny(impl="eager", num_hidden_layers=2), keeping_all(**looks)
    check(model, policy, read(model, policy, lengths), lengths)


@pytest.mark.parametrize(
    "looks", [{"prompt_stride": 3}, {"prompt_stride": 40}, {"prompt_stride": 4, "prompt_queries": 30}]
)
@pytest.mark.parametrize("chunk", [1, 7, 30])
def test_a_prompt_in_chunks_is_sampled_as_a_whole_one(chunk: int, looks: dict[str, int]) -> None:
    """The last query is always in, and chunks without a sampled query add nothing."""
    model, policy, lengths = tiny(impl="eager", num_hidden_layers=2), keeping_all(**looks), (61, 90)
    check(model, policy, read(model, policy, lengths, chunk=chunk), lengths)


@pytest.mark.parametrize("observed", [None, 1, 3, 8])
@pytest.mark.parametrize(("lengths", "forwards"), [((70,), [[1]] * 20), ((37, 70), STEPS), ((37, 70), OUT_OF_PHASE)])
def test_the_last_tokens_of_each_period_count_for_all(
    lengths: tuple[int, ...], forwards: Forwards, observed: int | None
) -> None:
    """Rows that are out of phase are looked at each in its own time; long forwards, before the event they cause."""
    model, policy = tiny(impl="eager", num_hidden_layers=2), keeping_all(observe_tokens=observed)
    check(model, policy, read(model, policy, lengths, forwards), lengths, forwards)


def test_an_early_event_is_looked_at_too() -> None:
    """Row 0 reaches ``min_tokens`` with its fifth token."""
    model, policy = tiny(impl="eager", num_hidden_layers=1), keeping_all(min_tokens=42, observe_tokens=2)
    check(model, policy, read(model, policy, (37, 70), STEPS), (37, 70), STEPS)


@pytest.mark.parametrize("name", ["evict_only", "qevict"])
def test_rows_out_of_phase_score_as_alone_while_windows_go(name: str) -> None:
    """Windows that were evicted or encoded on the way: only the run itself knows what is right."""
    model, lengths = tiny(num_hidden_layers=2), (90, 130)
    policy = attrs.evolve(policies.PRESETS[name]("50 %"), scorer=CumulativeAttention(prompt_stride=4, observe_tokens=3))
    ids, mask = prompts(*lengths)
    both = read_ids(model, policy, ids, mask, OUT_OF_PHASE)
    for number, length in enumerate(lengths):
        counts = [[row[number]] for row in OUT_OF_PHASE if row[number]]
        alone = read_ids(model, policy, ids[number : number + 1, -length:], None, counts)
        for own, theirs in zip(both, alone, strict=True):
            assert own[number].keys() == theirs[0].keys()
            assert own[number] == pytest.approx(theirs[0], rel=1e-3, abs=1e-3)


@torch.no_grad()
def read_ids(
    model: Any, policy: Policy, ids: Tensor, mask: Tensor | None, forwards: Forwards
) -> list[list[dict[int, float]]]:
    """As ``read``, with one token over and over."""
    mask = torch.ones_like(ids) if mask is None else mask
    with qevict.attach(model, policy) as session:
        cache = session.prefill(ids, mask)
        for counts in forwards:
            width = max(counts)
            real = torch.tensor([[0] * (width - count) + [1] * count for count in counts])
            mask = torch.cat((mask, real), 1)
            positions = (mask.cumsum(1) - 1)[:, -width:].clamp(min=0)
            model(11 * real, attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache})
    return [scores_of(layer) for layer in cache.engine.layers]


@attrs.frozen(eq=False)
class Listens(AttentionBackend):
    """The reference; notes whom it is asked about."""

    name: ClassVar[str] = "listens"
    provides: ClassVar[frozenset[Need]] = ReferenceAttention.provides
    heard: list[str | int]

    def attend(self, query: Query, view: View, *, want_mass: bool) -> Attended:
        self.heard.append("masses too" if want_mass else "output")
        return ReferenceAttention().attend(query, view, want_mass=want_mass)

    def mass(self, query: Query, view: View) -> Mass:
        self.heard.append(query.positions.shape[1])
        return ReferenceAttention().mass(query, view)


def test_what_is_not_looked_at_is_not_computed() -> None:
    heard: list[str | int] = []
    scorer = CumulativeAttention(prompt_stride=16, observe_tokens=2)
    policy = attrs.evolve(policies.evict_only("50 %"), scorer=scorer, backend=Listens(heard))
    read(tiny(num_hidden_layers=1), policy, (160,), [[1]] * 16 + [[5], [5]])
    period = ["output"] * 6 + ["masses too"] * 2
    assert heard == [10, *period, *period, "output", "output", 2]


@attrs.frozen
class Notes(CumulativeAttention):
    """Notes what it is shown."""

    name: ClassVar[str] = "notes"
    seen: list[Observation] = attrs.field(factory=list, eq=False)

    def update(self, state: State, observation: Observation) -> State:
        self.seen.append(observation)
        return state if observation.mass is None else CumulativeAttention.update(self, state, observation)


@attrs.frozen
class NotesValues(Notes):
    """Wants values as well."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.MASS, Need.VALUES})


def test_a_scorer_of_masses_alone_is_called_when_there_are_some() -> None:
    scorer = Notes(prompt_stride=5, observe_tokens=2)
    read(tiny(num_hidden_layers=1), attrs.evolve(policies.evict_only("50 %"), scorer=scorer), (90,), [[1]] * 16)
    assert [each.stands_for for each in scorer.seen] == [5, 4, 4, 4, 4]
    assert all(each.mass is not None for each in scorer.seen)


def test_a_scorer_that_needs_more_is_called_at_every_forward() -> None:
    scorer = NotesValues(observe_tokens=2)
    read(tiny(num_hidden_layers=1), attrs.evolve(policies.evict_only("50 %"), scorer=scorer), (90,), [[1]] * 16)
    told = [True] + ([False] * 6 + [True] * 2) * 2
    assert [each.mass is not None for each in scorer.seen] == told
    assert all(each.values is not None for each in scorer.seen)
