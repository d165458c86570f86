"""PyramidKV (arXiv 2406.02069): the scores of SnapKV, with budgets that fall from the first layer to the last."""

from fractions import Fraction


def prefix_tokens(capacity: int, window: int, length: int, layers: int, beta: int = 20) -> list[int]:
    """The authors' integers: tokens per layer before the window, which every layer keeps besides.

    The step is floored, so the sum overshoots ``layers * (capacity - window)``.
    """
    base = capacity - window
    if length < capacity:
        return [length - window] * layers
    if length < 2 * base or layers == 1:
        return [base] * layers
    least = base // beta
    most = 2 * base - least
    if most >= length - window:
        most = length - window
        least = 2 * base - most
    step = (most - least) // (layers - 1)
    return [most - layer * step for layer in range(layers)]


def tokens(keep: float | Fraction, window: int, length: int, layers: int, beta: int = 20) -> list[int]:
    """The form of kvpress: tokens per layer, the window included; ``keep``, the mean, need not be whole.

    Halves are rounded to even, so a float that falls just short of a half gives another figure than a Fraction.
    """
    least: float | Fraction = keep / beta
    most: float | Fraction = 2 * keep - least
    if most >= length - window:
        most = length - window
        least = 2 * keep - most
    if not length >= most >= least >= window or layers == 1:
        return [round(keep)] * layers
    step = (most - least) / (layers - 1)
    return [round(most - layer * step) for layer in range(layers)]
