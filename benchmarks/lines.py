"""How time grows with length: a straight line, and where two of them cross."""

from collections.abc import Sequence

import attrs


@attrs.frozen
class Line:
    """``time = start + slope * length``.

    Attributes:
        start: time per token at length 0, in units of the baseline named beside it.
        slope: what every further token of context adds, in the same unit.
        residual: largest distance of a measured point from the line, relative to that point.
    """

    start: float
    slope: float
    residual: float

    def at(self, length: float) -> float:
        """Time at a length."""
        return self.start + self.slope * length


def fit(lengths: Sequence[float], times: Sequence[float]) -> Line:
    """Least squares.

    Raises:
        ValueError: fewer than two different lengths.
    """
    if len(set(lengths)) < 2 or len(lengths) != len(times):
        raise ValueError(f"a line takes times at two or more lengths, got {lengths} and {times}")
    middle, height = sum(lengths) / len(lengths), sum(times) / len(times)
    rise = sum((length - middle) * (time - height) for length, time in zip(lengths, times, strict=True))
    slope = rise / sum((length - middle) ** 2 for length in lengths)
    start = height - slope * middle
    misses = (abs(start + slope * length - time) / time for length, time in zip(lengths, times, strict=True))
    return Line(start, slope, max(misses))


def break_even(own: Line, other: Line) -> float | None:
    """The length beyond which our line lies below the other's; 0 if it does everywhere, None if it never does."""
    if own.slope >= other.slope:
        return 0.0 if own.slope == other.slope and own.start < other.start else None
    return max(0.0, (own.start - other.start) / (other.slope - own.slope))
