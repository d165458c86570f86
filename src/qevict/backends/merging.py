"""Parts of one softmax, put together by their log-sum-exp."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Part:
    """Attention of each strip's queries to some of what it holds: ``output / total`` if there were nothing else.

    Attributes:
        strips: strip of each block; None if block and strip are the same.
        top: ``[blocks, queries]`` what the exponents were reduced by; finite, also where nothing is seen.
        total: ``[blocks, queries]`` sum of the weights ``exp(logit - top)``.
        output: ``[blocks, queries, head_dim]`` weighted sum of the values.
    """

    strips: Tensor | None
    top: Tensor
    total: Tensor
    output: Tensor


@attrs.frozen(eq=False)
class Whole:
    """Attention of each strip's queries to everything.

    Attributes:
        top: ``[strips, queries]`` the largest top of the parts.
        total: ``[strips, queries]`` sum of all weights ``exp(logit - top)``.
        output: ``[strips, queries, head_dim]``, 0 for queries that see nothing.
    """

    top: Tensor
    total: Tensor
    output: Tensor

    @property
    def lse(self) -> Tensor:
        """Natural log-sum-exp of the logits; minus infinity for queries that see nothing."""
        return self.top + self.total.log()

    def share(self, part: Part) -> Tensor:
        """Factor ``[blocks, queries]`` that makes a part's weights probabilities of the whole."""
        top, total = self.top, self.total
        if part.strips is not None:
            top, total = top[part.strips], total[part.strips]
        return (part.top - top).exp_().div_(_not_zero(total))


def merged(parts: Sequence[Part], strips: int) -> Whole:
    """Put parts together: weights are those of the softmax over everything that any part has seen."""
    only = parts[0]
    if len(parts) == 1 and only.strips is None:
        return Whole(only.top, only.total, only.output.div(_not_zero(only.total)[..., None]))
    queries, head_dim = only.output.shape[1:]
    top = only.top.new_full((strips, queries), torch.finfo(torch.float32).min)
    for part in parts:
        top = _take_larger(top, part)
    total, output = top.new_zeros(strips, queries), top.new_zeros(strips, queries, head_dim)
    for part in parts:
        weight = (part.top - (top if part.strips is None else top[part.strips])).exp_()
        _add(total, weight * part.total, part.strips)
        _add(output, weight[..., None] * part.output, part.strips)
    return Whole(top, total, output.div_(_not_zero(total)[..., None]))


def _take_larger(top: Tensor, part: Part) -> Tensor:
    if part.strips is None:
        return torch.maximum(top, part.top)
    return top.scatter_reduce(0, part.strips[:, None].expand_as(part.top), part.top, "amax")


def _add(sums: Tensor, amounts: Tensor, strips: Tensor | None) -> None:
    if strips is None:
        sums.add_(amounts)
    else:
        sums.index_add_(0, strips, amounts)


def _not_zero(total: Tensor) -> Tensor:
    """Queries that see nothing have a total of 0 and an output of 0; they are to stay so."""
    return total.masked_fill(total == 0, 1)
