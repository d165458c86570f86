"""What tests show a scorer of a baseline: few windows of one token each, at positions 0, 1, 2, ... unless said."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qevict.contracts.scorer import IMPORTANCE, Scorer
from qevict.contracts.values import Held, Observation, Windows


def windows(lanes: int, count: int, candidates: int | None = None, length: int | None = None) -> Windows:
    """As many windows in every lane; the first ``candidates`` of them have aged."""
    aged = count if candidates is None else candidates
    positions = torch.arange(count).expand(lanes, -1)
    present = torch.ones(lanes, count, dtype=torch.bool)
    lengths = torch.full((lanes,), count if length is None else length)
    return Windows(positions, present, positions < aged, present.long() - 1, (aged,) * lanes, lengths=lengths)


def prefix(attention: Sequence[Sequence[Sequence[float]]], kv_heads: int, recent: int = 0) -> Tensor:
    """``attention[query_head][query][key]`` as masses by query of lanes of one KV head, zero on recent windows."""
    masses = torch.tensor(attention).unflatten(0, (kv_heads, -1))
    return torch.nn.functional.pad(masses, (0, recent))


def looked(mass: Tensor, **shown: object) -> Observation:
    """A forward that shows masses, of no tokens that any window would take."""
    return Observation(torch.full((len(mass), 1), -1), mass.shape[-1], mass=mass, **shown)  # type: ignore[arg-type]


def kept(keys: Tensor, values: Tensor | None = None, sinks: int = 0) -> Held:
    """All tokens of lanes, ``[lanes, heads, tokens, head_dim]``, in order; those behind the sinks are windows."""
    positions = torch.arange(keys.shape[2]).expand(len(keys), -1)
    columns = (positions - sinks).clamp(min=-1)
    return Held(keys, keys if values is None else values, positions, positions, columns)


def ranked(scorer: Scorer, seen: Sequence[Observation], rectangle: Windows, name: str = IMPORTANCE) -> Tensor:
    """What a scorer says after some forwards."""
    lanes, count = rectangle.positions.shape
    state = scorer.start(lanes, count, torch.device("cpu"))
    for each in seen:
        state = scorer.update(state, each)
    return scorer.rank(state, rectangle)[name]


def close(found: Tensor, wanted: object, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=torch.float32), rtol=tolerance, atol=tolerance)
