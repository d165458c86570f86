"""What a difference between two policies is worth: a paired bootstrap."""

import functools
from collections.abc import Sequence

import attrs
import torch

RESAMPLES = 10_000
_LOW, _HIGH = 0.025, 0.975


@attrs.frozen
class Difference:
    """The mean of paired differences, and what 95 % of the resamples say.

    Attributes:
        mean: of ``ours - theirs`` over the pairs.
        low: 2.5th percentile of the mean over resamples of the pairs.
        high: 97.5th percentile.
    """

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """All of the interval lies on one side."""
        return not self.low <= 0.0 <= self.high


def paired_difference(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Difference:
    """Bootstrap the mean difference over pairs (percentile method; Efron and Tibshirani 1993, section 13.3).

    Args:
        ours: one figure per prompt.
        theirs: the other policy's figure on the same prompts, in the same order.
        seed: of the resampling; equal input gives equal intervals.

    Raises:
        ValueError: the two differ in length, or there are fewer than two pairs.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        msg = f"a paired bootstrap takes two or more pairs, got {len(ours)} and {len(theirs)} figures"
        raise ValueError(msg)
    return _resampled(tuple(float(one) - float(other) for one, other in zip(ours, theirs, strict=True)), seed)


@functools.lru_cache(maxsize=4096)
def _resampled(differences: tuple[float, ...], seed: int) -> Difference:
    """Remembered, since tables, claims and fronts ask for the same intervals again and again."""
    pairs = torch.tensor(differences, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(pairs), (RESAMPLES, len(pairs)), generator=generator)
    means = pairs[drawn].mean(dim=1)
    low, high = torch.quantile(means, torch.tensor([_LOW, _HIGH], dtype=torch.float64)).tolist()
    return Difference(float(pairs.mean()), low, high)
