"""KeyDiff, on keys as they are cached and before RoPE."""

import pytest
import torch
from torch import Tensor

from qevict.contracts.rotary import Rotary
from qevict.contracts.values import Held, Observation
from qevict.errors import PolicyError
from qevict.testing import ScorerContract
from qevict_baselines.keydiff import KeyDiff
from tests.baselines.shown import close, kept, ranked, windows
from tests.baselines.slow.keys import keydiff

ROTARY = Rotary(torch.tensor([1.0, 0.3, 0.1]), amplitude=1.2)


class TestKeyDiff(ScorerContract):
    examples = 8
    part = KeyDiff()


class TestKeyDiffPreRope(ScorerContract):
    examples = 8
    part = KeyDiff("pre_rope")


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shown(held: Held | None) -> Observation:
    return Observation(torch.full((2, 1), -1), 5, held=held, rotary=ROTARY)


def slow(keys: Tensor) -> list[list[float]]:
    """Sinks are a part of the anchor, and not ranked."""
    return [row[2:] for row in keydiff(keys[:, 0].tolist())]


def test_it_is_the_slow_one() -> None:
    """Of rotated keys, by default; on un-rotated ones as said."""
    before = drawn(0, 2, 1, 7, 8)
    rotated = ROTARY.rotate(before, torch.arange(7))
    close(ranked(KeyDiff(), [shown(kept(rotated, sinks=2))], windows(2, 5)), slow(rotated))
    close(ranked(KeyDiff("pre_rope"), [shown(kept(rotated, sinks=2))], windows(2, 5)), slow(before), 1e-5)


def test_a_lane_of_several_heads_takes_their_mean() -> None:
    keys = drawn(1, 2, 3, 7, 8)
    alone = [ranked(KeyDiff(), [shown(kept(keys[:, [head]], sinks=2))], windows(2, 5)) for head in range(3)]
    close(ranked(KeyDiff(), [shown(kept(keys, sinks=2))], windows(2, 5)), torch.stack(alone).mean(dim=0))


def test_every_event_judges_anew_and_other_forwards_leave_it() -> None:
    first, second = drawn(2, 2, 1, 7, 8), drawn(3, 2, 1, 7, 8)
    seen = [shown(kept(first, sinks=2)), shown(None), shown(kept(second, sinks=2)), shown(None)]
    close(ranked(KeyDiff(), seen[:2], windows(2, 5)), slow(first))
    close(ranked(KeyDiff(), seen, windows(2, 5)), slow(second))


def test_the_newest_windows_come_first_and_keep_their_order() -> None:
    """Windows of one token at positions 0 to 4 of rows of five: the last two."""
    keys = drawn(4, 2, 1, 7, 8)
    plain = torch.tensor(slow(keys))
    found = ranked(KeyDiff(newest_tokens=2), [shown(kept(keys, sinks=2))], windows(2, 5))
    assert (found[:, 3:].amin(1) > found[:, :3].amax(1)).all()
    assert torch.equal(found[:, 3:].argsort(1), plain[:, 3:].argsort(1))
    close(found[:, :3], plain[:, :3])


def test_another_domain_is_refused() -> None:
    with pytest.raises(PolicyError, match="domain is one of 'rotated', 'pre_rope', got 'rope'"):
        KeyDiff("rope")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="newest_tokens is a whole number of at least 0, got -1"):
        KeyDiff(newest_tokens=-1)
