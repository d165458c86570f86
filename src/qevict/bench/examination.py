"""Two questions on one context that was compressed before either was known."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

import qevict
from qevict.bench.prompts import Question, next_turn, reply_ids, split_prompt
from qevict.engine.report import Report
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.policy import Policy

REPLY_TOKENS = 48

Watcher = Callable[[Any], None]
"""Called with the cache after every forward."""


def unwatched(cache: Any) -> None:
    """Look at nothing."""


@attrs.frozen
class Reply:
    """One answer.

    Attributes:
        text: what the model wrote.
        right: it contains the answer.
        nats: mean negative log-likelihood of the right answer's tokens, behind the words that lead to it.
    """

    text: str
    right: bool
    nats: float


@attrs.frozen
class Examination:
    """What one policy made of the questions.

    Attributes:
        replies: one per question.
        compressed: the cache right after the context.
        finished: the cache after the last reply.
    """

    replies: tuple[Reply, ...]
    compressed: Report
    finished: Report

    @property
    def right(self) -> int:
        """Questions answered right."""
        return sum(reply.right for reply in self.replies)

    @property
    def nats(self) -> float:
        """Mean nats per token of the right answers."""
        return sum(reply.nats for reply in self.replies) / len(self.replies)


def context_ids(tokenizer: Any, document: str, questions: tuple[Question, ...]) -> Tensor:
    """The ids that every question shares."""
    return torch.tensor([split_prompt(tokenizer, document, questions[0].question)[0]])


def examine(
    model: Any,
    tokenizer: Any,
    policy: Policy,
    document: str,
    questions: tuple[Question, ...],
    watch: Watcher = unwatched,
) -> Examination:
    """Compress the context, then ask the questions one after another in one conversation.

    ``generate`` never caches the last token that it returns, so a reply enters the conversation without it.

    Args:
        model: a chat model.
        tokenizer: its tokenizer.
        policy: what rules the cache.
        document: what the questions are about.
        questions: asked in order; each reply stays in the conversation.
        watch: called with the cache after every forward.
    """
    with qevict.attach(model, policy) as session:
        cache = session.prefill(context_ids(tokenizer, document, questions))
        watch(cache)
        compressed = cache.report()
        replies = []
        for turn, question in enumerate(questions):
            ids = (
                next_turn(tokenizer, question.question)
                if turn
                else split_prompt(tokenizer, document, question.question)[1]
            )
            replies.append(_ask(session, tokenizer, cache, torch.tensor([ids]), question, watch))
        return Examination(tuple(replies), compressed, cache.report())


def _ask(session: Any, tokenizer: Any, cache: Any, ids: Tensor, question: Question, watch: Watcher) -> Reply:
    lead, answer = reply_ids(tokenizer, question)
    nats = float(reply_nats(session.model, cache.fork(), ids, [*lead, *answer])[len(lead) :].mean())
    out = session.generate(
        ids,
        cache=cache,
        do_sample=False,
        min_new_tokens=REPLY_TOKENS,
        max_new_tokens=REPLY_TOKENS,
        stopping_criteria=StoppingCriteriaList([_Watch(cache, watch)]),
    )
    text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return Reply(text.strip(), question.is_answered_by(text), nats)


class _Watch(StoppingCriteria):
    """Lets somebody look at the cache after every token."""

    def __init__(self, cache: Any, watch: Watcher) -> None:
        self.cache, self.watch = cache, watch

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs: Any) -> Tensor:
        self.watch(self.cache)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def reply_nats(model: Any, cache: Any, question: Tensor, reply: list[int]) -> Tensor:
    """Negative log-likelihood in nats of each token of a reply, teacher-forced behind the question."""
    ids = torch.cat((question, torch.tensor([reply])), dim=1)
    logits = model(ids, use_cache=True, **{CACHE_ARGUMENT: cache}).logits[0, -len(reply) - 1 : -1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, -len(reply) :], reduction="none")
