"""What all layers of one cache share about time: how far each row is, and when events are due."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from qevict.errors import InputError
from qevict.transfer import to_device


@attrs.frozen(eq=False)
class Arrival:
    """The tokens of one forward.

    Attributes:
        start: slots seen before, pads included.
        positions: ``[rows, tokens]`` true position of each new token; -1 for pads.
        before: true tokens of each row before this forward.
        after: likewise, after it.
        lengths: ``after`` on the device.
        due: rows whose routing event falls at the end of this forward.
        left: tokens that each row may get until its next event.
        in_prompt: the prompt had not ended before this forward.
        whole_prompt: the prompt ends with this forward.
        padded: some row has pads, now or earlier.
    """

    start: int
    positions: Tensor
    before: tuple[int, ...]
    after: tuple[int, ...]
    lengths: Tensor
    due: tuple[bool, ...]
    left: tuple[int, ...]
    in_prompt: bool
    whole_prompt: bool
    padded: bool

    @property
    def tokens(self) -> int:
        """New slots, pads included."""
        return self.positions.shape[1]

    @property
    def event(self) -> bool:
        """Some row has a routing event."""
        return any(self.due)


@attrs.define(eq=False)
class Clock:
    """Counts tokens by row, on the host and on the device.

    Attributes:
        period_tokens: tokens between events.
        min_tokens: a row that reaches this length has an event at once.
        seen: slots seen, pads included.
        tokens: true tokens of each row.
        since: true tokens of each row since its last event.
        unbroken: true tokens at the end of each row with no pad between them.
        events: how long each row was at each of its events; forgotten once something was evicted or encoded.
        prompt_tokens: slots of the prompt, if announced.
        prompted: the prompt has ended.
        held: the prompt is not to end with any forward.
        lengths: ``tokens`` on the device.
        offset: rotary minus true position, by row.
        faults: two flags, read at the next event: a position that did not continue its row; a real token masked.
    """

    period_tokens: int
    min_tokens: int = 0
    seen: int = 0
    tokens: tuple[int, ...] = ()
    since: tuple[int, ...] = ()
    unbroken: tuple[int, ...] = ()
    events: tuple[tuple[int, ...], ...] = ()
    prompt_tokens: int | None = None
    prompted: bool = False
    held: bool = False
    lengths: Tensor | None = None
    offset: Tensor | None = None
    faults: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return sum(tensor.nbytes for tensor in (self.lengths, self.offset, self.faults) if tensor is not None)

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows, in that order, for each time that a row is named."""
        self.tokens, self.since, self.unbroken = (
            tuple(own[row] for row in rows) for own in (self.tokens, self.since, self.unbroken)
        )
        self.events = tuple(self.events[row] for row in rows) if self.events else ()
        self.lengths, self.offset = (
            None if own is None else own[to_device(rows, own.device)] for own in (self.lengths, self.offset)
        )

    def before(self, slots: int) -> tuple[int, ...]:
        """How long each row was before the last ``slots`` slots.

        Raises:
            InputError: some row had no token then, or has pads among them or behind its first token.
        """
        for row, (own, unbroken) in enumerate(zip(self.tokens, self.unbroken, strict=True)):
            if unbroken < min(slots, own) or 0 < own <= slots:
                msg = (
                    f"{slots} tokens cannot be taken back from row {row}: it ends in {unbroken} of its {own} tokens "
                    f"without a pad, and must keep 1; take fewer back, or leave the row out first"
                )
                raise InputError(msg)
        return tuple(max(0, own - slots) for own in self.tokens)

    def last_events(self, tokens: Sequence[int]) -> tuple[tuple[int, bool], ...]:
        """For rows cut to these lengths: the last event before, 0 for none, and whether one falls at their new end."""
        if not self.prompted:
            return ((0, False),) * len(tokens)
        return tuple(map(self._last_event, self.events, tokens))

    def _last_event(self, events: Sequence[int], tokens: int) -> tuple[int, bool]:
        """The forward that is cut ends here, so that an event which came at its end now comes here, or not at all."""
        earlier = [own for own in events if own < tokens]
        if not earlier:  # the prompt ends here
            return 0, True
        outgrown = earlier[-1] < self.min_tokens <= tokens
        return earlier[-1], outgrown or tokens - earlier[-1] >= self.period_tokens

    def cut(self, slots: int, tokens: Sequence[int], last: Sequence[tuple[int, bool]]) -> None:
        """Go back to these lengths, ``slots`` slots ago, given :meth:`last_events`."""
        self.unbroken = tuple(
            unbroken - (own - now) for unbroken, own, now in zip(self.unbroken, self.tokens, tokens, strict=True)
        )
        self.since = tuple(0 if due else now - own for (own, due), now in zip(last, tokens, strict=True))
        if self.events:
            self.events = tuple(
                (*(own for own in events if own < now + (not due)), *((now,) if due else ()))
                for events, now, (_, due) in zip(self.events, tokens, last, strict=True)
            )
        self.seen, self.tokens = self.seen - slots, tuple(tokens)
        if self.prompted and self.prompt_tokens is not None:
            self.prompt_tokens = min(self.prompt_tokens, self.seen)
        assert self.lengths is not None
        self.lengths = to_device(tokens, self.lengths.device, self.lengths.dtype)

    def begin(self, valid: Tensor | None, visible: Tensor | None, position_ids: Tensor, rows: int) -> Arrival:
        """Read one forward's tokens.

        Forwards of one token, between the prompt's end and the next event, are trusted until that event, so that they
        need not ask the device; all others ask it once.

        Args:
            valid: ``[rows, tokens]``, False for pads; None if there are none.
            visible: ``[rows]`` keys, old and new, that the mask lets the last query see; None without a mask.
            position_ids: rotary positions as the model received them.
            rows: rows of the batch.

        Raises:
            InputError: right padding, position ids that do not count up, or another number of rows than before.
        """
        if self.tokens and rows != len(self.tokens):
            msg = f"the cache holds {len(self.tokens)} rows, the inputs have {rows}; use a new cache for another batch"
            raise InputError(msg)
        before, rotary = self.tokens or (0,) * rows, position_ids.expand(rows, -1)
        width, trusted = rotary.shape[1], self.prompted and rotary.shape[1] == 1
        lengths = rotary.new_zeros(rows) if self.lengths is None else self.lengths
        valid = None if trusted else valid
        grown = lengths + (width if valid is None else valid.sum(1))
        masked = rotary.new_zeros((), dtype=torch.bool) if visible is None else (visible != grown).any()
        true = _true_positions(lengths, valid, width)
        offset = self._offset(rotary, true, lengths)
        astray = ((true >= 0) & (rotary != true + offset[:, None])).any()
        faults = torch.stack((astray, masked))
        faults = faults if self.faults is None else faults | self.faults
        new = (width,) * rows if trusted else _ask(valid, faults, rows, width)
        after = tuple(old + more for old, more in zip(before, new, strict=True))
        ends = not self.prompted and not self.held and self.seen + width >= (self.prompt_tokens or 0)
        if ends and 0 in after:
            msg = f"row {after.index(0)} has no real token: its attention mask is 0 throughout; drop the row"
            raise InputError(msg)
        self.offset, self.faults = offset, faults
        since = [old + more for old, more in zip(self.since or (0,) * rows, new, strict=True)]
        due = tuple(ends or (self.prompted and self._is_due(*row)) for row in zip(since, before, after, strict=True))
        left = tuple(self.period_tokens - (0 if now else count) for now, count in zip(due, since, strict=True))
        padded = any(count != self.seen + width for count in after)
        return Arrival(self.seen, true, before, after, grown, due, left, not self.prompted, ends, padded)

    def hold(self) -> None:
        """The prompt goes on until :meth:`Clock.end_prompt`, however many tokens come."""
        self.held = True

    def still(self, due: Sequence[bool] | None = None, *, ends_prompt: bool = False) -> Arrival:
        """A forward of no tokens.

        Args:
            due: rows whose routing event it brings; None for none.
            ends_prompt: the prompt ends with it.
        """
        assert self.lengths is not None
        rows = len(self.tokens)
        due = (False,) * rows if due is None else tuple(due)
        return Arrival(
            start=self.seen,
            positions=torch.empty(rows, 0, dtype=self.lengths.dtype, device=self.lengths.device),
            before=self.tokens,
            after=self.tokens,
            lengths=self.lengths,
            due=due,
            left=tuple(self.period_tokens - (0 if now else own) for now, own in zip(due, self.since, strict=True)),
            in_prompt=ends_prompt or not self.prompted,
            whole_prompt=ends_prompt,
            padded=any(own != self.seen for own in self.tokens),
        )

    def finish(self, arrival: Arrival) -> None:
        """Move on, when the last layer is done."""
        rows = len(arrival.after)
        new = [after - before for before, after in zip(arrival.before, arrival.after, strict=True)]
        since, unbroken = self.since or (0,) * rows, self.unbroken or (0,) * rows
        self.since = tuple(0 if due else old + more for due, old, more in zip(arrival.due, since, new, strict=True))
        self.unbroken = tuple(
            own + more if more == arrival.tokens else more for own, more in zip(unbroken, new, strict=True)
        )
        if arrival.event:
            old = self.events or ((),) * rows
            ends = zip(old, arrival.due, arrival.after, strict=True)
            self.events = tuple((*own, after) if due else own for own, due, after in ends)
        self.seen += arrival.tokens
        self.tokens, self.lengths = arrival.after, arrival.lengths
        self.prompted = self.prompted or arrival.whole_prompt

    def _is_due(self, since: int, before: int, after: int) -> bool:
        return since >= self.period_tokens or before < self.min_tokens <= after

    def _offset(self, rotary: Tensor, true: Tensor, lengths: Tensor) -> Tensor:
        """A row's offset shows with its first real token, which left padding may put in a later forward."""
        if self.prompted and self.offset is not None:
            return self.offset
        first = rotary[:, -1] - true[:, -1]
        return first if self.offset is None else torch.where(lengths == 0, first, self.offset)


def _ask(valid: Tensor | None, faults: Tensor, rows: int, width: int) -> tuple[int, ...]:
    """How many tokens each row got, and whether anything is wrong with them; one question to the device."""
    if valid is None:
        refuse(*faults.tolist())
        return (width,) * rows
    hole = (valid[:, :-1] & ~valid[:, 1:]).any()
    *counts, hollow, astray, masked = torch.cat((valid.sum(1), hole[None].long(), faults.long())).tolist()
    if hollow:
        msg = "right padding (or a hole in the attention mask) is not supported; pad on the left"
        raise InputError(f"{msg}: tokenizer.padding_side = 'left'")
    refuse(astray, masked)
    return tuple(counts)


def refuse(astray: int, masked: int) -> None:
    """Raise if an earlier forward was not what it had to be.

    Raises:
        InputError: a position did not continue its row, or a real token was masked.
    """
    if astray:
        msg = (
            "position ids must count up by one along the real tokens of each row, over all forwards of a cache; "
            "custom position ids are not supported; with left padding give position ids at every step, or at none"
        )
        raise InputError(msg)
    if masked:
        msg = (
            "the attention mask hides tokens that were real when they came, or a new one while decoding; "
            "give the mask of the left pads and ones for all that follows"
        )
        raise InputError(msg)


def _true_positions(lengths: Tensor, valid: Tensor | None, width: int) -> Tensor:
    first = lengths[:, None]
    if valid is None:
        return first + torch.arange(width, device=lengths.device)
    return torch.where(valid, first + valid.cumsum(1) - 1, -1)
