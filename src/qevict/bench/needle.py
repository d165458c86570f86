"""Needle in a haystack: one prefill per prompt, compressed by every policy before the question is seen."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

import qevict
from qevict import policies
from qevict.bench.examination import reply_nats
from qevict.bench.needles import Needle, document
from qevict.bench.prompts import reply_ids, split_prompt
from qevict.bench.sharing import SharedMasses
from qevict.engine.report import Report
from qevict.errors import PolicyError
from qevict.policy import Policy

STORED = torch.bfloat16
FULL = "full"


@attrs.frozen
class Score:
    """What one policy made of one prompt.

    Attributes:
        nats: mean negative log-likelihood of the answer's tokens, teacher-forced behind question and lead-in.
        sentence_nats: the same over the whole reply, lead-in included.
        exact_share: bytes of the compressed context relative to a full cache in the stored dtype.
        paper_share: the same in the paper's accounting.
    """

    nats: float
    sentence_nats: float
    exact_share: float
    paper_share: float


Scores = Mapping[str, Sequence[Score]]
"""Scores by policy, in the order of the prompts."""


@attrs.frozen
class Contestant:
    """A policy, and the one that it is compared with.

    Attributes:
        policy: the policy.
        against: name of another contestant; None for the one that all are measured by.
    """

    policy: Policy
    against: str | None


BUDGETS = ("20 %", "10 %")


def contestants(budgets: Sequence[str] = BUDGETS) -> dict[str, Contestant]:
    """The policies of the first figures, by name; full precision is stored in 16 bits in all of them."""
    field = {FULL: Contestant(policies.full(dtype=STORED), None)}
    for budget in budgets:
        evict, ours = f"evict-only, {budget}", f"QEvict, {budget}"
        field |= {
            f"sinks + recent, {budget}": Contestant(policies.sinks_recent(budget, dtype=STORED), evict),
            evict: Contestant(policies.evict_only(budget, dtype=STORED), FULL),
            ours: Contestant(policies.qevict(budget, dtype=STORED), evict),
            f"QEvict, paper accounting, {budget}": Contestant(
                policies.qevict(budget, accounting="paper", dtype=STORED), ours
            ),
            f"evict-only, windows of 1, {budget}": Contestant(
                policies.evict_only(budget, window_tokens=1, dtype=STORED), evict
            ),
            f"evict-only, windows of 32, {budget}": Contestant(
                policies.evict_only(budget, window_tokens=32, dtype=STORED), evict
            ),
            f"QEvict, windows of 32, {budget}": Contestant(
                policies.qevict(budget, window_tokens=32, dtype=STORED), ours
            ),
        }
    return field


def guest(policy: Policy, field: Mapping[str, Contestant]) -> Contestant:
    """A policy from outside, compared with QEvict at the same budget, or with the full cache if there is none.

    Raises:
        PolicyError: it stores full precision in another dtype than the field: equal budgets would not be equal bytes.
    """
    if policy.dtype not in {None, STORED}:
        msg = f"figures compare bytes of {STORED} storage, this policy stores {policy.dtype}; set it to bfloat16"
        raise PolicyError(msg)
    own = attrs.evolve(policy, dtype=STORED)
    rival = policies.qevict(own.budget, dtype=STORED) if own.budget else None
    return Contestant(own, next((name for name, other in field.items() if other.policy == rival), FULL))


def measure(
    model: Any,
    tokenizer: Any,
    plans: Mapping[str, Policy],
    needles: Sequence[Needle],
    tick: Callable[[], None] = lambda: None,
) -> dict[str, list[Score]]:
    """Score every policy on every prompt.

    The context is read once by the model; its recording is played into a cache of each policy, which compresses it as
    if it had been read for it alone. Then question, lead-in and answer follow in one forward.

    Args:
        model: a chat model.
        tokenizer: its tokenizer.
        plans: policies by name.
        needles: the prompts.
        tick: called after every policy of every prompt.
    """
    found: dict[str, list[Score]] = {name: [] for name in plans}
    with qevict.attach(model, policies.full()) as session:
        for needle in needles:
            text = document(needle)
            context, question = (torch.tensor([ids]) for ids in split_prompt(tokenizer, text, needle.asked.question))
            recording, (lead, answer) = session.record(context), reply_ids(tokenizer, needle.asked)
            masses = SharedMasses(len(recording.incoming))
            for name, policy in plans.items():
                cache = qevict.Cache(model, masses.give_to(policy))
                recording.play_into(cache)
                found[name].append(_score(cache.report(), reply_nats(model, cache, question, lead + answer), len(lead)))
                tick()
    return found


def _score(report: Report, nats: Tensor, lead_tokens: int) -> Score:
    full = report.full_bytes
    shares = report.exact_bytes / full, report.paper_bytes / full
    return Score(float(nats[lead_tokens:].mean()), float(nats.mean()), *shares)
