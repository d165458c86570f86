"""One token of every lane, where all lanes have regions of one length: a decode step of a solo row or an even batch."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from qevict.backends.coded import CodedShelf, readable
from qevict.backends.logits import capped
from qevict.backends.shelves import Shelf, decoded, first_positions, per_slot, sinks
from qevict.contracts.backend import Attended, Query, View


def is_even(view: View) -> bool:
    """Every pool gives each lane equally many slots, so that ``[lanes, slots]`` is a rectangle as it lies."""
    return all(min(regions) == max(regions) for regions in (view.regions, *(each.regions for each in view.encoded)))


@runtime_checkable
class _Read(Protocol):
    """A segment that is read in the order of its slots."""

    @property
    def slots(self) -> Tensor | None:
        """Slot of each column of the view; None for sinks."""

    @property
    def tokens(self) -> int:
        """Tokens of one lane."""

    def logits(self, asking: Tensor, softcap: float | None) -> Tensor:
        """``[strips, group, tokens]`` scaled dot products, capped; minus infinity for what is hidden."""

    def output(self, share: Tensor) -> Tensor:
        """``[strips, group, head_dim]`` values weighed by ``[strips, group, tokens]``."""

    def by_slot(self, share: Tensor) -> Tensor:
        """``[strips, group, slots]`` weights summed over the tokens of a window."""


def attend(query: Query, view: View, *, want_mass: bool) -> Attended:
    """Attention of one token by matrix products; a query sees whatever is written."""
    lanes, heads, group, _, head_dim = query.vectors.shape
    shelves = _shelves(view, lanes)
    asking = (query.vectors.float() * query.scaling).transpose(0, 1).reshape(heads * lanes, group, head_dim)
    parts = [shelf.logits(asking, query.softcap) for shelf in shelves]
    if query.sink_logits is not None:
        parts.append(query.sink_logits.transpose(0, 1).reshape(heads * lanes, group, 1))
    logits = torch.cat(parts, dim=2)
    weights = logits.softmax(2)
    shares = weights.split([part.shape[2] for part in parts], dim=2)[: len(shelves)]
    output = shelves[0].output(shares[0])
    for shelf, share in zip(shelves[1:], shares[1:], strict=True):
        output += shelf.output(share)
    lse = logits.amax(2) - weights.amax(2).log()
    answer = Attended(
        output.view(heads, lanes, group, 1, head_dim).transpose(0, 1).to(query.vectors.dtype),
        lse.view(heads, lanes, group, 1).transpose(0, 1),
    )
    return _with_masses(answer, shares, shelves, view) if want_mass else answer


def _shelves(view: View, lanes: int) -> list[_Read]:
    found: list[_Read] = [_EvenShelf(sinks(view), lanes)] if view.sink_keys.shape[2] else []
    if sum(view.regions):
        found.append(_EvenShelf(Shelf(view.keys, view.values, view.regions, view.hidden, view.slots), lanes))
    column = view.slots.shape[1]
    for segment in view.encoded:
        assert view.rotary is not None
        whole = view.rotary.rotary_dim == view.keys.shape[3]
        if whole and readable(segment.keys, segment.values, view.keys.shape[2]):
            first = first_positions(view, segment.slots, column, sum(segment.regions))
            positions = first + per_slot(view.rotary_offset, segment.regions)
            found.append(CodedShelf(segment, lanes, view.keys.shape[2], view.rotary, positions))
        else:
            found.append(_EvenShelf(decoded(view, segment, column), lanes))
        column += segment.slots.shape[1]
    return found


@attrs.frozen(eq=False)
class _EvenShelf:
    """A shelf of plain keys and values."""

    shelf: Shelf
    lanes: int

    @property
    def slots(self) -> Tensor | None:
        return self.shelf.slots

    @property
    def tokens(self) -> int:
        return self.shelf.regions[0] * self.shelf.keys.shape[2]

    def logits(self, asking: Tensor, softcap: float | None) -> Tensor:
        logits = capped(torch.bmm(asking, self._strips(self.shelf.keys).transpose(1, 2)), softcap)
        by_slot = logits.view(-1, self.lanes, logits.shape[1], self.shelf.regions[0], self.shelf.keys.shape[2])
        by_slot.masked_fill_(self.shelf.hidden.view(self.lanes, 1, self.shelf.regions[0], -1), -torch.inf)
        return logits

    def output(self, share: Tensor) -> Tensor:
        return torch.bmm(share, self._strips(self.shelf.values))

    def by_slot(self, share: Tensor) -> Tensor:
        by_slot: Tensor = share.unflatten(2, (self.shelf.regions[0], -1)).sum(3)
        return by_slot

    def _strips(self, pool: Tensor) -> Tensor:
        """``[heads, slots, window, head_dim]`` as ``[heads * lanes, tokens, head_dim]`` in fp32."""
        return pool.reshape(pool.shape[0] * self.lanes, -1, pool.shape[3]).float()


def _with_masses(answer: Attended, shares: Sequence[Tensor], shelves: Sequence[_Read], view: View) -> Attended:
    """Window masses are weights that are there already, summed."""
    lanes, heads, group = answer.output.shape[:3]
    columns, protected = [], answer.lse.new_zeros(lanes, heads * group)
    for share, shelf in zip(shares, shelves, strict=True):
        by_slot = shelf.by_slot(share).view(heads, lanes, group, -1).transpose(0, 1)
        if shelf.slots is None:
            protected = by_slot.reshape(lanes, heads * group)
        else:
            columns.append(_by_column(by_slot.reshape(lanes, heads * group, -1), shelf.slots))
    none = answer.lse.new_zeros(lanes, heads * group, 0)
    mass = columns[0] if len(columns) == 1 else torch.cat([none, *columns], dim=2)
    if view.present is not None:
        mass = mass.masked_fill(view.absent[:, None], 0)
    return attrs.evolve(answer, mass=mass, protected_mass=protected)


def _by_column(by_slot: Tensor, slots: Tensor) -> Tensor:
    """``[lanes, q_heads, slots of a lane]`` in the order of the view's columns."""
    lanes, q_heads, own = by_slot.shape
    if lanes == 1:
        return by_slot[:, :, slots[0]]
    first = torch.arange(lanes, device=by_slot.device)[:, None] * own
    # Filler points anywhere; where it leaves its lane's region it is brought back, and its mass is cleared later.
    by_column: Tensor = by_slot.gather(2, (slots - first).clamp(0, own - 1).long()[:, None].expand(-1, q_heads, -1))
    return by_column
