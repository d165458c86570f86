"""The engine's table of records: one line per live window, flat over lanes, so that no lane pays for another."""

import itertools
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from qevict.contracts.scorer import Scorer, State
from qevict.contracts.values import PROTECTED
from qevict.transfer import to_device

_WINDOW_BITS = 40

Counts = tuple[tuple[int, ...], ...]
"""How many, by segment and lane; known on the host."""


@attrs.frozen(eq=False)
class Grid:
    """The records as a rectangle over lanes: columns of the dense segment first, then of each encoded one.

    Those of :meth:`Records.in_lines` are one segment in which all lines of a lane follow one another.

    Attributes:
        lanes: rows of the rectangle.
        widths: columns of each segment.
        index: ``[lanes, columns]`` line of each column, any valid line where absent; None where no column is absent, so
            that the rectangle is the table itself.
        present: False for filler; None where there is none.
    """

    lanes: int
    widths: tuple[int, ...]
    index: Tensor | None
    present: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Lanes and columns."""
        return self.lanes, sum(self.widths)

    def spread(self, column: Tensor) -> Tensor:
        """A column of the table as ``[lanes, columns, ...]``; filler repeats some other line."""
        return column.view(*self.shape, *column.shape[1:]) if self.index is None else column[self.index]

    def collect(self, rectangle: Tensor, lines: int) -> Tensor:
        """The inverse of :meth:`spread`."""
        if self.index is None:
            return rectangle.flatten(0, 1)
        assert self.present is not None
        flat = rectangle.new_empty((lines + 1, *rectangle.shape[2:]))
        flat[torch.where(self.present, self.index, lines)] = rectangle
        return flat[:lines]


@attrs.define(eq=False)
class Records:
    """Lines sorted by lane, then segment, then window; ``slots`` and ``state`` change while they live.

    Attributes:
        counts: lines by segment and lane, on the host.
        widths: most lines that a lane has in each segment.
        window: index of each window in its row; its first true position is ``sinks + window * window_tokens``.
        place: tier, or ``PROTECTED``.
        moves: how often the window changed tier.
        slots: ``[lines, segments]`` slot in each pool, -1 for none; codes that outlive a promotion keep theirs.
        state: the scorer's columns.
        opened: windows opened so far, by lane.
        starts: ``[lanes, segments]`` first line of each segment, ``first_line`` added.
        sizes: ``[lanes, segments]`` lines of each segment.
        base: by lane, the line of window ``w`` less ``w``, ``first_line`` added, for windows not yet aged: they are the
            last lines of the dense segment, without a gap.
        first_line: where this table begins in the one that it is a part of.
    """

    counts: Counts
    widths: tuple[int, ...]
    window: Tensor
    place: Tensor
    moves: Tensor
    slots: Tensor
    state: State
    opened: tuple[int, ...]
    starts: Tensor
    sizes: Tensor
    base: Tensor
    first_line: int = 0

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(self.opened)

    @property
    def lines(self) -> int:
        """Live windows of all lanes."""
        return self.window.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole table."""
        own = (self.window, self.place, self.moves, self.slots, self.starts, self.sizes, self.base)
        return sum(tensor.nbytes for tensor in (*own, *self.state.values()))

    def lane_of(self) -> Tensor:
        """Lane of each line."""
        totals = self.sizes.sum(1)
        lanes = torch.arange(self.lanes, device=totals.device)
        return lanes.repeat_interleave(totals, output_size=self.lines)

    def lines_of(self, windows: Tensor) -> Tensor:
        """``[lanes, n]`` lines of windows not yet aged."""
        return self.base.unsqueeze(1) + (windows - self.first_line)

    def columns_of(self, windows: Tensor) -> Tensor:
        """``[lanes, n]`` columns in either rectangle of windows not yet aged; -1 where a window is below 0."""
        columns = windows + (self.base.unsqueeze(1) - self.starts.narrow(1, 0, 1))
        return columns.masked_fill_(windows < 0, -1)

    @property
    def even(self) -> bool:
        """All lanes have equally many lines in each segment, so that the lines are a rectangle."""
        return all(min(lanes) == max(lanes) for lanes in self.counts)

    def in_lines(self) -> Grid:
        """The rectangle over lanes as if there were one segment: the lines of each lane as they follow one another."""
        totals = [*map(sum, zip(*self.counts, strict=True))]
        width = max(totals)
        if min(totals) == width:
            return Grid(self.lanes, (width,), None, None)
        steps = torch.arange(width, device=self.starts.device)
        lines = (self.starts.narrow(1, 0, 1) + (steps - self.first_line)).clamp_(max=max(self.lines - 1, 0))
        return Grid(self.lanes, (width,), lines, steps < self.sizes.sum(1, keepdim=True))

    def grid(self) -> Grid:
        """The rectangle over lanes; its operator count depends on nothing but the number of segments."""
        if self.even:
            return Grid(self.lanes, self.widths, None, None)
        device, index, present = self.starts.device, [], []
        for segment, width in enumerate(self.widths):
            steps = torch.arange(width, device=device)
            index.append(self.starts[:, segment : segment + 1] + (steps - self.first_line))
            present.append(steps < self.sizes[:, segment : segment + 1])
        lines = torch.cat(index, 1).clamp_(max=max(self.lines - 1, 0))
        return Grid(self.lanes, self.widths, lines, torch.cat(present, 1))

    def take(self, lines: Tensor) -> "dict[str, Tensor | State]":
        """Columns of some lines."""
        return {
            "window": self.window[lines],
            "place": self.place[lines],
            "moves": self.moves[lines],
            "slots": self.slots[lines],
            "state": {name: column[lines] for name, column in self.state.items()},
        }


def joined(tables: Sequence[Records]) -> Records:
    """One table of the lanes of several, one after another."""
    first = tables[0]
    if len(tables) == 1:
        return first
    return lay_out(
        tuple(tuple(itertools.chain(*lanes)) for lanes in zip(*(own.counts for own in tables), strict=True)),
        window=torch.cat([own.window for own in tables]),
        place=torch.cat([own.place for own in tables]),
        moves=torch.cat([own.moves for own in tables]),
        slots=torch.cat([own.slots for own in tables]),
        state={name: torch.cat([own.state[name] for own in tables]) for name in first.state},
        opened=tuple(itertools.chain(*(own.opened for own in tables))),
    )


def parted(records: Records, parts: int) -> list[Records]:
    """The inverse of :func:`joined` for parts of equally many lanes: views of the one table."""
    if parts == 1:
        return [records]
    lanes = records.lanes // parts
    counts = [tuple(own[first : first + lanes] for own in records.counts) for first in range(0, records.lanes, lanes)]
    lines = [sum(map(sum, own)) for own in counts]
    before = [*itertools.accumulate(lines, initial=0)]
    starts, sizes, base = (own.split(lanes) for own in (records.starts, records.sizes, records.base))
    window, place, moves, slots = (
        column.split(lines) for column in (records.window, records.place, records.moves, records.slots)
    )
    states = {name: column.split(lines) for name, column in records.state.items()}
    return [
        Records(
            counts=counts[part],
            widths=tuple(map(max, counts[part])),
            window=window[part],
            place=place[part],
            moves=moves[part],
            slots=slots[part],
            state={name: column[part] for name, column in states.items()},
            opened=records.opened[part * lanes : (part + 1) * lanes],
            starts=starts[part],
            sizes=sizes[part],
            base=base[part],
            first_line=before[part],
        )
        for part in range(parts)
    ]


def state_of(records: Records, grid: Grid, scorer: Scorer) -> State:
    """The scorer's state as a rectangle; absent columns are as if nothing had been observed."""
    if grid.present is None:
        return {name: grid.spread(column) for name, column in records.state.items()}
    fresh, spread = scorer.start(*grid.shape, grid.present.device), {}
    for name, column in records.state.items():
        present = grid.present.view(*grid.present.shape, *(1,) * (column.ndim - 1))
        spread[name] = torch.where(present, grid.spread(column), fresh[name])
    return spread


def remember(records: Records, grid: Grid, state: State) -> None:
    """Write the scorer's state back, in place: tables that share a column see it too.

    A scorer may hand back what it was lent, as it is or under another name, so that nothing is written before all is
    read.
    """
    lent = {column.untyped_storage().data_ptr() for column in records.state.values()}
    found = {name: grid.collect(state[name], records.lines) for name in records.state}
    apart = {name: own.clone() if own.untyped_storage().data_ptr() in lent else own for name, own in found.items()}
    for name, column in records.state.items():
        column.copy_(apart[name])


def empty(lanes: int, segments: int, state: State, device: torch.device) -> Records:
    """A table without a line."""
    return lay_out(
        tuple((0,) * lanes for _ in range(segments)),
        window=torch.empty(0, dtype=torch.int32, device=device),
        place=torch.empty(0, dtype=torch.int8, device=device),
        moves=torch.empty(0, dtype=torch.int16, device=device),
        slots=torch.empty(0, segments, dtype=torch.int32, device=device),
        state={name: column[0] for name, column in state.items()},
        opened=(0,) * lanes,
    )


def opened_until(records: Records, until: Sequence[int], slots: Tensor, state: State) -> Records:
    """The table with new protected windows in every lane, up to ``until``; ``slots`` are theirs in the dense pool."""
    device = records.window.device
    new = [goal - old for goal, old in zip(until, records.opened, strict=True)]
    counts = to_device(new, device)
    total = slots.shape[0]
    lane = torch.arange(records.lanes, device=device).repeat_interleave(counts, output_size=total)
    first = to_device(records.opened, device) - (counts.cumsum(0) - counts)
    fresh = torch.full((total, records.slots.shape[1]), -1, dtype=torch.int32, device=device)
    fresh[:, 0] = slots
    window = (torch.arange(total, device=device) + first[lane]).int()
    order = _order(
        torch.cat((records.lane_of(), lane)),
        torch.cat((segments_of(records), torch.zeros_like(lane))),
        torch.cat((records.window, window)),
        records.slots.shape[1],
    )
    dense = tuple(old + more for old, more in zip(records.counts[0], new, strict=True))
    return lay_out(
        (dense, *records.counts[1:]),
        window=torch.cat((records.window, window))[order],
        place=torch.cat((records.place, torch.full_like(window, PROTECTED, dtype=torch.int8)))[order],
        moves=torch.cat((records.moves, torch.zeros_like(window, dtype=torch.int16)))[order],
        slots=torch.cat((records.slots, fresh))[order],
        state={name: torch.cat((column, state[name][0]))[order] for name, column in records.state.items()},
        opened=tuple(until),
    )


def kept(records: Records, keep: Tensor, segment: Tensor, counts: Counts) -> Records:
    """The table with the lines of ``keep`` only, sorted into their new segments."""
    total = sum(map(sum, counts))
    lines = torch.nonzero_static(keep, size=total)[:, 0]
    order = _order(records.lane_of()[lines], segment[lines], records.window[lines], len(counts))
    return lay_out(counts, opened=records.opened, **records.take(lines[order]))  # type: ignore[arg-type]


def selected(records: Records, lanes: Sequence[int]) -> Records:
    """The table of some lanes, in that order, for each time that a lane is named; slots are as they were."""
    lines = [*map(sum, zip(*records.counts, strict=True))]
    firsts, device = [*itertools.accumulate(lines, initial=0)], records.window.device
    sizes = [lines[lane] for lane in lanes]
    before = itertools.accumulate(sizes, initial=0)
    shift = to_device([firsts[lane] - own for lane, own in zip(lanes, before, strict=False)], device)
    total = sum(sizes)
    line = shift.repeat_interleave(to_device(sizes, device), output_size=total) + torch.arange(total, device=device)
    counts = tuple(tuple(own[lane] for lane in lanes) for own in records.counts)
    opened = tuple(records.opened[lane] for lane in lanes)
    return lay_out(counts, opened=opened, **records.take(line))  # type: ignore[arg-type]


def cut(records: Records, until: Sequence[int], aged: Sequence[int]) -> Records:
    """The table with the first ``until`` windows of each lane, ``aged`` of them in tier 0; all lie in one segment."""
    device, lane = records.window.device, records.lane_of()
    lines = torch.nonzero_static(records.window < to_device(until, device)[lane], size=sum(until))[:, 0]
    columns = records.take(lines)
    old = records.window[lines] < to_device(aged, device)[lane[lines]]
    columns["place"] = torch.where(old, 0, PROTECTED).to(records.place.dtype)
    none = (0,) * records.lanes
    counts = (tuple(until), *(none for _ in records.counts[1:]))
    return lay_out(counts, opened=tuple(until), **columns)  # type: ignore[arg-type]


def segments_of(records: Records) -> Tensor:
    """Segment of each line, from the table's own extents."""
    flat = records.sizes.flatten()
    names = torch.arange(records.sizes.shape[1], device=flat.device).repeat(records.lanes)
    return names.repeat_interleave(flat, output_size=records.lines)


def _order(lane: Tensor, segment: Tensor, window: Tensor, segments: int) -> Tensor:
    return (((lane * segments + segment) << _WINDOW_BITS) + window).argsort()


def lay_out(
    counts: Counts,
    *,
    window: Tensor,
    place: Tensor,
    moves: Tensor,
    slots: Tensor,
    state: State,
    opened: tuple[int, ...],
) -> Records:
    """A table from its columns, whose lines are sorted by lane, then segment, then window."""
    sizes = to_device(tuple(zip(*counts, strict=True)), window.device)
    flat = sizes.flatten()
    starts = (flat.cumsum(0) - flat).view_as(sizes)
    base = starts[:, 0] + sizes[:, 0] - to_device(opened, window.device)
    widths = tuple(map(max, counts))
    return Records(counts, widths, window, place, moves, slots, state, opened, starts, sizes, base)
