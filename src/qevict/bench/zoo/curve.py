"""A policy's loss as a function of its bytes, and what it would be in between."""

import math
from bisect import bisect_left
from collections.abc import Sequence


def interpolate(points: Sequence[tuple[float, float]], share: float) -> float | None:
    """The loss at some bytes, on straight lines over the logarithm of bytes.

    Args:
        points: (share of a full cache's bytes, loss), ascending; the full cache itself among them.
        share: where the loss is asked for.

    Returns:
        None outside of the points: nothing is known there.
    """
    shares = [own for own, _ in points]
    if not points or not shares[0] <= share <= shares[-1]:
        return None
    right = bisect_left(shares, share)
    if shares[right] == share:
        return points[right][1]
    (low, before), (high, behind) = points[right - 1], points[right]
    part = math.log(share / low) / math.log(high / low)
    return before + part * (behind - before)
