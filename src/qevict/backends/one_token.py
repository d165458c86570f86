"""One token of every lane, where all lanes have regions of one length: a decode step of a solo row or an even batch."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from qevict.backends.shelves import Shelf
from qevict.contracts.backend import Attended, Query, View


def is_even(view: View) -> bool:
    """Every pool gives each lane equally many slots, so that ``[lanes, slots]`` is a rectangle as it lies."""
    return all(min(regions) == max(regions) for regions in (view.regions, *(each.regions for each in view.encoded)))


def attend(query: Query, shelves: Sequence[Shelf], view: View, *, want_mass: bool) -> Attended:
    """Attention of one token by matrix products; a query sees whatever is written."""
    lanes, heads, group, _, head_dim = query.vectors.shape
    asking = (query.vectors.float() * query.scaling).transpose(0, 1).reshape(heads * lanes, group, head_dim)
    logits = torch.cat([_logits(asking, shelf, lanes) for shelf in shelves], dim=2)
    weights = logits.softmax(2)
    shares = weights.split([shelf.regions[0] * shelf.keys.shape[2] for shelf in shelves], dim=2)
    output = _sum(shares, shelves)
    lse = logits.amax(2) - weights.amax(2).log()
    answer = Attended(
        output.view(heads, lanes, group, 1, head_dim).transpose(0, 1).to(query.vectors.dtype),
        lse.view(heads, lanes, group, 1).transpose(0, 1),
    )
    return _with_masses(answer, shares, shelves, view) if want_mass else answer


def _logits(asking: Tensor, shelf: Shelf, lanes: int) -> Tensor:
    """Scaled dot products ``[strips, group, keys]``; minus infinity for what is hidden."""
    logits = torch.bmm(asking, _strips(shelf.keys, lanes).transpose(1, 2))
    if shelf.hidden is not None:
        shape = (-1, lanes, logits.shape[1], *shelf.hidden.unflatten(0, (lanes, -1)).shape[1:])
        by_slot = logits.view(*shape) if shelf.hidden.ndim == 2 else logits.view(*shape, shelf.keys.shape[2])
        hidden = shelf.hidden.view(lanes, 1, -1, shelf.keys.shape[2] if shelf.hidden.ndim == 2 else 1)
        by_slot.masked_fill_(hidden, -torch.inf)
    return logits


def _strips(pool: Tensor, lanes: int) -> Tensor:
    """``[heads, slots, window, head_dim]`` as ``[heads * lanes, tokens, head_dim]`` in fp32."""
    return pool.reshape(pool.shape[0] * lanes, -1, pool.shape[3]).float()


def _sum(shares: Sequence[Tensor], shelves: Sequence[Shelf]) -> Tensor:
    """Values weighed by their shares."""
    output = None
    for share, shelf in zip(shares, shelves, strict=True):
        values = _strips(shelf.values, share.shape[0] // shelf.values.shape[0])
        output = torch.bmm(share, values) if output is None else torch.baddbmm(output, share, values)
    assert output is not None
    return output


def _with_masses(answer: Attended, shares: Sequence[Tensor], shelves: Sequence[Shelf], view: View) -> Attended:
    """Window masses are weights that are there already, summed."""
    lanes, heads, group = answer.output.shape[:3]
    columns, protected = [], answer.lse.new_zeros(lanes, heads * group)
    for share, shelf in zip(shares, shelves, strict=True):
        by_slot = share.unflatten(2, (shelf.regions[0], -1)).sum(3).view(heads, lanes, group, -1).transpose(0, 1)
        if shelf.slots is None:
            protected = by_slot.reshape(lanes, heads * group)
        else:
            columns.append(_by_column(by_slot.reshape(lanes, heads * group, -1), shelf))
    mass = columns[0] if len(columns) == 1 else torch.cat(columns, dim=2)
    if view.present is not None:
        mass = mass.masked_fill(view.absent[:, None], 0)
    return attrs.evolve(answer, mass=mass, protected_mass=protected)


def _by_column(by_slot: Tensor, shelf: Shelf) -> Tensor:
    """``[lanes, q_heads, slots of a lane]`` in the order of the view's columns."""
    assert shelf.slots is not None
    lanes, q_heads, _ = by_slot.shape
    if lanes == 1:
        return by_slot[:, :, shelf.slots[0]]
    first = torch.arange(lanes, device=by_slot.device)[:, None] * shelf.regions[0]
    # Filler points anywhere; where it leaves its lane's region it is brought back, and its mass is cleared later.
    own = (shelf.slots - first).clamp(0, shelf.regions[0] - 1)
    return by_slot.gather(2, own.long()[:, None].expand(-1, q_heads, -1))
