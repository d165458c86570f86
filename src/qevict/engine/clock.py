"""What all layers of one cache share about time: how far each row is, and when events are due."""

import attrs
import torch
from torch import Tensor

from qevict.errors import InputError


@attrs.frozen(eq=False)
class Arrival:
    """The tokens of one forward.

    Attributes:
        start: slots seen before, pads included.
        positions: ``[rows, tokens]`` true position of each new token; -1 for pads.
        before: true tokens of each row before this forward.
        after: likewise, after it.
        due: rows whose routing event falls at the end of this forward.
        whole_prompt: the prompt ends with this forward.
        padded: some row has pads, now or earlier.
    """

    start: int
    positions: Tensor
    before: tuple[int, ...]
    after: tuple[int, ...]
    due: tuple[bool, ...]
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
    """Counts tokens by row. The host knows every count; the device keeps each row's rotary offset.

    Attributes:
        period_tokens: tokens between events.
        seen: slots seen, pads included.
        tokens: true tokens of each row.
        since: true tokens of each row since its last event.
        prompt_tokens: slots of the prompt, if announced.
        prompted: the prompt has ended.
        offset: rotary minus true position, by row.
        drift: some later position did not continue its row; read at the next event.
    """

    period_tokens: int
    seen: int = 0
    tokens: tuple[int, ...] = ()
    since: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    prompted: bool = False
    offset: Tensor | None = None
    drift: Tensor | None = None

    def begin(self, valid: Tensor | None, position_ids: Tensor, rows: int) -> Arrival:
        """Read one forward's tokens; changes nothing but the rotary offset and the drift flag.

        Args:
            valid: ``[rows, tokens]``, False for pads; None if there are none.
            position_ids: rotary positions as the model received them.
            rows: rows of the batch.

        Raises:
            InputError: right padding, position ids that do not count up, or another number of rows than before.
        """
        if self.tokens and rows != len(self.tokens):
            msg = f"the cache holds {len(self.tokens)} rows, the inputs have {rows}; use a new cache for another batch"
            raise InputError(msg)
        before = self.tokens or (0,) * rows
        rotary = position_ids.expand(rows, -1)
        valid = valid if self._checked(rotary) else None
        positions = _true_positions(before, valid, rotary)
        new = self._follow(rotary, positions, valid, before)
        after = tuple(old + more for old, more in zip(before, new, strict=True))
        width = rotary.shape[1]
        ends = not self.prompted and self.seen + width >= (self.prompt_tokens or 0)
        if ends and 0 in after:
            msg = f"row {after.index(0)} has no real token: its attention mask is 0 throughout; drop the row"
            raise InputError(msg)
        since = [old + more for old, more in zip(self.since or (0,) * rows, new, strict=True)]
        due = tuple(ends or (self.prompted and count >= self.period_tokens) for count in since)
        padded = any(count != self.seen + width for count in after)
        return Arrival(self.seen, positions, before, after, due, ends, padded)

    def finish(self, arrival: Arrival) -> None:
        """Move on, when the last layer is done."""
        since = self.since or (0,) * len(arrival.after)
        new = (after - before for before, after in zip(arrival.before, arrival.after, strict=True))
        self.since = tuple(0 if due else old + more for due, old, more in zip(arrival.due, since, new, strict=True))
        self.seen += arrival.tokens
        self.tokens = arrival.after
        self.prompted = self.prompted or arrival.whole_prompt

    def _checked(self, rotary: Tensor) -> bool:
        """One-token forwards of a decode are trusted until the next event, so that they need not ask the device."""
        return not self.prompted or rotary.shape[1] > 1

    def _follow(self, rotary: Tensor, true: Tensor, valid: Tensor | None, before: tuple[int, ...]) -> tuple[int, ...]:
        """Positions must count up by one along the true tokens of a row; returns how many tokens each row got."""
        if self.offset is None or self.drift is None:
            self.offset = torch.zeros_like(rotary[:, 0])
            self.drift = torch.zeros(1, dtype=torch.bool, device=rotary.device)
        if 0 in before:  # a row's offset shows with its first real token, which left padding may put in a later forward
            new = torch.tensor([not count for count in before], device=rotary.device)
            self.offset = torch.where(new, rotary[:, -1] - true[:, -1], self.offset)
        wrong = (true >= 0) & (rotary != true + self.offset[:, None])
        self.drift = self.drift | wrong.any()
        rows, width = rotary.shape
        if not self._checked(rotary):
            return (width,) * rows
        if valid is None:
            refuse_drift(bool(self.drift))
            return (width,) * rows
        hole = (valid[:, :-1] & ~valid[:, 1:]).any()
        numbers = torch.cat((valid.sum(1), hole[None].long(), self.drift.long()))
        *counts, broken, astray = numbers.tolist()
        _refuse_holes(broken=bool(broken))
        refuse_drift(bool(astray))
        return tuple(counts)


def refuse_drift(astray: bool) -> None:  # noqa: FBT001 - the finding itself
    """Raise if positions went astray.

    Raises:
        InputError: some position did not continue its row.
    """
    if astray:
        msg = (
            "position ids must count up by one along the real tokens of each row, over all forwards of a cache; "
            "custom position ids are not supported; with left padding give position ids at every step, or at none"
        )
        raise InputError(msg)


def _refuse_holes(*, broken: bool) -> None:
    if broken:
        msg = (
            "right padding (or a hole in the attention mask) is not supported; "
            "pad on the left: tokenizer.padding_side = 'left'"
        )
        raise InputError(msg)


def _true_positions(before: tuple[int, ...], valid: Tensor | None, rotary: Tensor) -> Tensor:
    first = torch.tensor(before, device=rotary.device)[:, None]
    if valid is None:
        return first + torch.arange(rotary.shape[1], device=rotary.device)
    return torch.where(valid, first + valid.cumsum(1) - 1, -1)
