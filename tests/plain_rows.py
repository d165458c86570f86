"""What rows of a cache are made of, in plain Python, and what a policy says about them, as numbers."""

from collections.abc import Callable

import attrs
from torch import Tensor

from qevict.contracts.rotary import Rotary

UNRANKED = -1
"""Place of windows that no event has ranked yet."""


@attrs.frozen(eq=False)
class Held:
    """One representation of a window, ``[heads, window, head_dim]``: keys as attention reads them, and values.

    Attributes:
        keys: rotated.
        values: as they are.
        decoded: keys before rotation, where codes hold them; None in full precision.
    """

    keys: Tensor
    values: Tensor
    decoded: Tensor | None = None


@attrs.define(eq=False)
class Window:
    """A window that an event has ranked, in one lane.

    Attributes:
        place: its tier.
        full: what it holds in full precision, if it does.
        codes: by tier, what its codes decode to.
        moves: how often it changed its tier.
    """

    place: int
    full: Held | None
    codes: dict[int, Held]
    moves: int = 0

    @property
    def best(self) -> Held:
        """The finest representation at hand, which is also the one that attention reads."""
        return self.full or self.codes[min(self.codes)]

    def copy(self) -> "Window":
        return Window(self.place, self.full, dict(self.codes), self.moves)


@attrs.define(eq=False)
class Row:
    """One row: everything that it was ever given, and what is held of it.

    Attributes:
        keys: by layer, ``[kv_heads, tokens, head_dim]`` as the model rotated them.
        values: likewise.
        slots: whether each slot that was seen is a token; the others are pads.
        offset: rotary minus true position.
        turns: by window, tokens of windows that came in the forwards since its first token.
        ends: length after each forward that brought a token, and whether an event followed.
        lanes: by layer and lane, the ranked windows that are held, by index.
        ranked: windows that an event has ranked; those before it which no lane holds are gone.
        since: tokens since the last event.
    """

    keys: list[Tensor]
    values: list[Tensor]
    lanes: list[list[dict[int, Window]]]
    slots: list[bool] = attrs.field(factory=list)
    offset: int = 0
    turns: list[int] = attrs.field(factory=list)
    ends: list[tuple[int, bool]] = attrs.field(factory=list)
    ranked: int = 0
    since: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.slots)

    def copy(self) -> "Row":
        return attrs.evolve(
            self,
            keys=list(self.keys),
            values=list(self.values),
            lanes=[[{at: own.copy() for at, own in lane.items()} for lane in layer] for layer in self.lanes],
            slots=list(self.slots),
            turns=list(self.turns),
            ends=list(self.ends),
        )


@attrs.frozen(eq=False)
class Rules:
    """What a policy says, as numbers.

    Attributes:
        window: tokens of a window.
        period: tokens between events.
        sinks: first tokens, never ranked.
        recent: last tokens, never ranked.
        least: tokens below which nothing is ranked.
        heads: by lane of a row, its KV heads.
        shares: by tier, its part of a lane's bytes.
        bits: by tier, bits of its codes; None for full precision.
        prices: by tier, bytes of a window.
        capacity: bytes that a lane's ranked windows may take, by tokens of the row and layer; None for no limit.
        score: of a window, by row, layer, first KV head of the lane, and window.
        remembers: the score depends on what came.
        rotary: turns decoded keys.
    """

    window: int
    period: int
    sinks: int
    recent: int
    least: int
    heads: tuple[slice, ...]
    shares: tuple[float, ...]
    bits: tuple[int | None, ...]
    prices: tuple[int, ...]
    capacity: Callable[[int, int], int | None]
    score: Callable[["Rules", Row, int, int, int], int]
    remembers: bool
    rotary: Rotary

    def windows(self, tokens: int) -> int:
        """Windows that a row of so many tokens has begun."""
        return max(0, -(-(tokens - self.sinks) // self.window))

    def aged(self, tokens: int) -> int:
        """Windows of which every token has left the recent region."""
        return 0 if tokens < self.least else max(0, tokens - self.sinks - self.recent) // self.window

    def span(self, window: int) -> slice:
        """True positions of a window."""
        return slice(self.first(window), self.first(window) + self.window)

    def first(self, window: int) -> int:
        """First true position of a window."""
        return self.sinks + window * self.window
