"""AdaKV's budgets as the router gives them, by loops."""

from collections.abc import Sequence
from fractions import Fraction

from qevict_baselines.adakv import Floor
from tests.baselines.slow.adakv import blended, floored
from tests.baselines.slow.basics import top, top_flat
from tests.routers.by_loop import Remaining


def budgets(left: Remaining, scores: Sequence[Sequence[float]], slots: int, floor: Floor, alpha: Fraction) -> list[int]:
    """In words: shares of the best, blended or with a floor; never more than there are slots, and no slot wasted."""
    base = slots // len(scores)
    if floor == "hard":
        safe = floored(scores, int(base * alpha))
        return [len(own) for own in top_flat(safe, slots, left.order)]
    if sum(map(len, scores)) <= slots:
        return [len(own) for own in scores]
    sizes = blended([len(own) for own in top_flat(scores, slots, left.order)], base, alpha)
    excess = sum(sizes) - slots
    for head in sorted(range(len(sizes)), key=lambda head: (-sizes[head], -head))[: max(excess, 0)]:
        sizes[head] -= 1
    beyond = sum(max(size - len(own), 0) for size, own in zip(sizes, scores, strict=True))
    kept = [top(own, size) for own, size in zip(scores, sizes, strict=True)]
    lost = [
        [-1.0 if at in own else score for at, score in enumerate(row)] for row, own in zip(scores, kept, strict=True)
    ]
    more = top_flat(lost, beyond, left.order)
    return [len(own) + sum(at not in own for at in extra) for own, extra in zip(kept, more, strict=True)]
