"""Parts and presets as a plugin could offer them, with options of every type; an entry point can name this module."""

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

import attrs
import torch
from torch import Tensor

from qevict.contracts.budget import Budget
from qevict.contracts.quantizer import Quantizer
from qevict.contracts.scorer import Scorer, State
from qevict.contracts.values import Observation, Windows
from qevict.policies import evict_only
from qevict.policy import Policy
from qevict.registry import hookimpl
from qevict.scorers.cumulative import CumulativeAttention


class Mute(Scorer):
    """A scorer as far as registering it goes."""

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        raise NotImplementedError

    def update(self, state: State, observation: Observation) -> State:
        raise NotImplementedError

    def rank(self, state: State, windows: Windows) -> Mapping[str, Tensor]:
        raise NotImplementedError


class Shape(enum.Enum):
    FLAT = "flat"
    STEEP = "steep"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@attrs.frozen
class Point:
    x: float
    y: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))


@attrs.frozen
class Everything(Mute):
    """One option of every type that a file can hold."""

    name: ClassVar[str] = "everything"
    count: int = attrs.field(default=1, validator=attrs.validators.in_([1, 2, 3]))
    rate: float = 0.5
    flag: bool = False
    label: str = "a"
    pair: tuple[int, str] = (1, "one")
    many: tuple[float, ...] = ()
    names: frozenset[str] = frozenset()
    mode: Literal["a", "b", 3] = "a"
    maybe: int | None = None
    either: float | int | str = 0
    dtype: torch.dtype = torch.float16
    shape: Shape = Shape.FLAT
    level: Level = Level.LOW
    table: Mapping[str, int] = attrs.field(factory=dict)
    point: Point = Point(1.0)
    points: "tuple[Point, ...]" = ()
    inner: Scorer | None = None
    codec: tuple[Quantizer, ...] = ()
    budget: Budget | None = None
    _hidden: int = 0


@attrs.frozen
class Ordered(Mute):
    """Two fields that look at each other."""

    name: ClassVar[str] = "ordered"
    low: int = attrs.field(default=5)
    high: int = attrs.field(default=9)
    odd: int = attrs.field(default=1, converter=abs)

    @high.validator
    def _above_low(self, _attribute: object, value: int) -> None:
        if value <= self.low:
            raise ValueError(f"high is above low, {self.low}, got {value}")

    @odd.validator
    def _is_odd(self, _attribute: object, value: int) -> None:
        if value % 2 == 0:
            raise RuntimeError(f"{value} is even")

    def __attrs_post_init__(self) -> None:
        if self.low + self.high == 13:
            raise ValueError("low and high\n  add up to 13")


class Plain(Mute):
    """No attrs class, and no options."""

    name: ClassVar[str] = "plain"


class Stateful(Mute):
    """No attrs class, but with an option."""

    name: ClassVar[str] = "stateful"

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth


class Needy(Mute):
    """No attrs class, and never without an argument."""

    name: ClassVar[str] = "needy"

    def __init__(self, depth: int) -> None:
        self.depth = depth


@attrs.frozen(eq=False)
class Codebook(Mute):
    """Holds what a file cannot."""

    name: ClassVar[str] = "codebook"
    entries: Tensor | None = None
    anything: Any = None


@attrs.frozen
class Bare(Mute):
    """Does not say of what type its field is."""

    name = "bare"
    depth = attrs.field(default=None)  # type: ignore[var-annotated]  # that is the point


@attrs.frozen
class Postponed(Mute):
    """One annotation names what only a type checker knows; the others are none the worse for it."""

    name: ClassVar[str] = "postponed"
    depth: "int" = 1
    inner: "Point | None" = None
    unknown: "NotThere | None" = None  # type: ignore[name-defined]  # noqa: F821 - that is the point


@attrs.frozen(eq=False)
class Board(Mute):
    """Needs what a file cannot hold."""

    name: ClassVar[str] = "board"
    entries: Tensor


@attrs.frozen
class Limited(Mute):
    """None is not its default."""

    name: ClassVar[str] = "limited"
    limit: int | None = 8
    others: tuple[int | None, ...] = ()


def _double(depth: int) -> int:
    return 2 * depth


@attrs.frozen
class Doubling(Mute):
    """What it holds is not what it was given."""

    name: ClassVar[str] = "doubling"
    depth: int = attrs.field(default=1, converter=_double)
    width: int = 1


@hookimpl
def qevict_scorers() -> Iterable[type[Scorer]]:
    return [Everything, Ordered, Plain, Stateful, Needy, Codebook, Bare, Board, Postponed, Limited, Doubling]


def composed(
    budget: Budget | str,
    *,
    scorer: Scorer | None = None,
    how: Literal["plain", "strict"] = "plain",
    bits: float = 2.5,
    min_tokens: int | None = None,
    paper: bool = False,
    dtype: torch.dtype | None = None,
) -> Policy:
    """Takes options of every type, and a part."""
    if bits > 8:
        raise ValueError(f"bits={bits} is above 8")
    return attrs.evolve(
        evict_only(budget, dtype=dtype),
        scorer=scorer or CumulativeAttention(),
        strict=how == "strict",
        min_tokens=min_tokens or 0,
        accounting="paper" if paper else "exact",
    )


def by_table(budget: Budget | str, *, table: Tensor | None = None) -> Policy:
    """Takes what a file cannot hold."""
    return evict_only(budget)


def needs_depth(budget: Budget | str, depth: int, *, sink_tokens: int = 5) -> Policy:
    """Has no default for its depth."""
    return evict_only(budget, sink_tokens=sink_tokens, recent_tokens=depth)


def no_policy() -> Any:
    """Is what no preset should be."""
    return 3


@hookimpl
def qevict_presets() -> Iterable[Callable[..., Policy]]:
    return [composed, by_table, needs_depth, no_policy]
