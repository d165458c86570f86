"""One prompt: read once, then every policy in every cell."""

import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

import qevict
from qevict.bench.sharing import SharedMasses
from qevict.bench.zoo.field import Run
from qevict.bench.zoo.prompts import Prompt, Reading, read
from qevict.errors import QevictError
from qevict.hf.cache import Cache
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.hf.recording import Recording
from qevict.hf.together import read_last

_TOGETHER = 8
"""Caches behind which the reply is read in one forward; more would hold more memory and gain little."""


@attrs.frozen
class Score:
    """What one policy made of one prompt.

    Attributes:
        nats: mean negative log-likelihood of the tokens that count, teacher-forced.
        exact: each of these tokens is the model's first choice.
        share: bytes of the compressed prompt relative to a full cache in the stored dtype.
    """

    nats: float
    exact: bool
    share: float


@attrs.frozen
class Outcome:
    """What came of a visit.

    Attributes:
        prompt: key of the prompt.
        scores: by the key of the run.
        refused: why a policy could not be measured, by the key of the run.
        tokens: how many were compressed, by mode.
        read_seconds: spent on reading the prompt.
        run_seconds: spent on the policies.
    """

    prompt: str
    scores: dict[str, Score]
    refused: dict[str, str]
    tokens: dict[str, int]
    read_seconds: float
    run_seconds: float


@attrs.frozen(eq=False)
class _Part:
    """A prompt cut where it is compressed.

    Attributes:
        recording: of what lies before the cut.
        rest: the tokens behind it.
        scored: places of the tokens that count, in the rest.
    """

    recording: Recording
    rest: Tensor
    scored: Tensor


@torch.no_grad()
def measure(session: Any, tokenizer: Any, prompt: Prompt, runs: Sequence[Run]) -> Outcome:
    """Read a prompt once and play it into a cache of every policy; then the rest follows, in one forward for many.

    Args:
        session: of a model that any policy is attached to.
        tokenizer: the model's.
        prompt: what is read.
        runs: what is measured on it.
    """
    start = time.monotonic()
    by_mode = {mode: [run for run in runs if run.cell.mode == mode] for mode in prompt.modes}
    by_mode = {mode: own for mode, own in by_mode.items() if own}
    reading = read(tokenizer, prompt)
    parts = _parts(session, reading, tuple(by_mode))
    half = time.monotonic()
    scores: dict[str, Score] = {}
    refused: dict[str, str] = {}
    for mode, own in by_mode.items():
        masses = SharedMasses(len(parts[mode].recording.incoming))
        for first in range(0, len(own), _TOGETHER):
            found, failed = _score(session.model, parts[mode], own[first : first + _TOGETHER], masses)
            scores |= found
            refused |= failed
    tokens = {mode: reading.cuts[mode] for mode in by_mode}
    return Outcome(prompt.key, scores, refused, tokens, half - start, time.monotonic() - half)


def _parts(session: Any, reading: Reading, modes: Sequence[str]) -> dict[str, _Part]:
    ids = torch.tensor([reading.ids])
    whole = session.record(ids[:, : max(reading.cuts[mode] for mode in modes)])
    parts = {}
    for mode in modes:
        cut = reading.cuts[mode]
        # Layers of the library have dropped tokens when a longer prompt has been read: such a model reads twice.
        recording = session.record(ids[:, :cut]) if whole.others else whole.until(cut)
        parts[mode] = _Part(recording, ids[:, cut:], torch.tensor(reading.scored) - cut)
    return parts


def _score(
    model: Any, part: _Part, runs: Sequence[Run], masses: SharedMasses
) -> tuple[dict[str, Score], dict[str, str]]:
    caches, shares, refused = {}, {}, {}
    for run in runs:
        try:
            cache = qevict.Cache(model, masses.give_to(run.policy))
            part.recording.play_into(cache)
        except QevictError as error:
            refused[run.key] = str(error)
            continue
        report = cache.report()
        caches[run.key], shares[run.key] = cache, report.exact_bytes / report.full_bytes
    scores = {}
    for key, logits in zip(caches, _logits(model, list(caches.values()), part), strict=True):
        wanted = part.rest[0, part.scored]
        own = logits[part.scored - int(part.scored[0])].float()
        nats = torch.nn.functional.cross_entropy(own, wanted)
        scores[key] = Score(float(nats), bool((own.argmax(dim=-1) == wanted).all()), shares[key])
    return scores, refused


def _logits(model: Any, caches: Sequence[Cache], part: _Part) -> list[Tensor]:
    """For each cache, the logits from which the tokens that count are told, and all between the first and the last."""
    wanted = part.rest.shape[1] - int(part.scored[0]) + 1
    if not caches:
        return []
    if any(cache.library_layers for cache in caches):
        return [_alone(model, cache, part.rest, wanted) for cache in caches]
    return list(read_last(model, caches, part.rest, logits=wanted))


def _alone(model: Any, cache: Cache, rest: Tensor, wanted: int) -> Tensor:
    found: Tensor = model(rest, use_cache=True, logits_to_keep=wanted, **{CACHE_ARGUMENT: cache}).logits[0]
    return found
