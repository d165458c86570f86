"""The frozen values that pass between the parts."""

import enum
from collections.abc import Mapping
from typing import Literal

import attrs
import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from qevict.contracts.output import OutputProjection
from qevict.contracts.rotary import Rotary
from qevict.shapes import LaneMask, LaneTokens, LaneWindows, Mass, MassByQuery, PerLane, Queries, TokenVectors

Granularity = Literal["row", "kv_head"]
"""Which unit decides on its own: a row (all KV heads share one decision) or each (row, KV head) pair."""

RouteAt = Literal["period", "prompt"]
"""When windows are routed: at the prompt's end and then by period, or once, at the prompt's end."""

Positions = Literal["original", "cache_relative"]
"""Where attention sees kept keys: at their true positions, or at their places in the cache."""

PROTECTED = -1
"""Place of a window that has not aged yet: full precision, never ranked."""


class Need(enum.Enum):
    """What a scorer asks to be shown. What is not declared is not computed.

    Attributes:
        MASS: attention masses of each forward, by window. Free for single tokens; a second pass over a prompt's keys.
        MASS_BY_QUERY: masses of the prompt's last queries, each by itself, at its end. A pass over the keys; in a
            prompt that is read in pieces the queries are held until then.
        QUERIES: these queries themselves, likewise.
        KEYS: the keys of each forward.
        VALUES: the values of each forward.
        POSITIONS: where each column's window lies. Shown beside others.
        FIRST_LOOKS: which lanes begin a period. Shown beside others.
        PROMPT: everything that is held at the prompt's end; a copy in fp32.
        HELD: likewise at every event of some row. Lanes of rows that have none are shown too: what is read off it
            replaces what was, and never adds up.
        ROTARY: what turns keys. Shown beside others.
        OUTPUT_PROJECTION: what a value does to the layer's output. Shown beside others.
        RECONSTRUCTION: masses of a repetition of the prompt; reading takes two to three times as long. It comes in the
            place of the prompt's end, so that nothing that is shown there can be needed beside it.
    """

    MASS = "mass"
    MASS_BY_QUERY = "mass by query"
    QUERIES = "queries"
    KEYS = "keys"
    VALUES = "values"
    POSITIONS = "positions"
    FIRST_LOOKS = "first looks"
    PROMPT = "prompt"
    HELD = "held"
    ROTARY = "rotary"
    OUTPUT_PROJECTION = "output projection"
    RECONSTRUCTION = "reconstruction"


ATTENDED = frozenset({Need.MASS, Need.MASS_BY_QUERY})
"""What comes from the attention backend; everything else the engine shows by itself."""


@attrs.frozen
class Geometry:
    """The sizes of a model's cache.

    Attributes:
        layers: layers that the policy owns.
        q_heads: query heads of one layer.
        kv_heads: key/value heads of one layer.
        head_dim: channels of one key or value.
        dtype: the dtype in which full precision is stored.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer at full precision: key and value of every KV head."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@attrs.frozen(eq=False)
class Windows:
    """The windows of one layer, as a rectangle over its lanes.

    Columns are grouped by storage and ascending in position inside a group; lanes with fewer windows have absent
    columns. Nothing may depend on the order of columns.

    Attributes:
        positions: first true position of each window in its row.
        present: False for filler.
        candidate: may be ranked now (present and aged).
        place: tier index now, or ``PROTECTED``.
        candidates: how many candidates each lane has, known on the host.
        lengths: true tokens of each lane.
        layers: layers whose lanes are here, one after another.
        lanes_per_row: lanes of one row in one layer, one after another.
    """

    positions: LaneWindows
    present: LaneMask
    candidate: LaneMask
    place: LaneWindows
    candidates: tuple[int, ...]
    lengths: PerLane = attrs.field(kw_only=True)
    layers: int = attrs.field(default=1, kw_only=True)
    lanes_per_row: int = attrs.field(default=1, kw_only=True)


@attrs.frozen(eq=False)
class Held:
    """Keys and values of everything that a layer holds, as stored: codes decoded, sinks first, then window by window.

    Attributes:
        keys: rotated.
        values: likewise by token.
        positions: true position of each token; -1 for filler and for tokens not written yet, which mean nothing.
        rotary_positions: by which the keys were rotated.
        columns: column of each token's window; -1 for sinks, filler and what is not written.
    """

    keys: TokenVectors
    values: TokenVectors
    positions: LaneTokens
    rotary_positions: LaneTokens
    columns: LaneTokens


@attrs.frozen(eq=False)
class Observation:
    """What one forward showed of one layer; or of all, whose lanes follow one another like those of more rows.

    What concerns single queries (``mass_by_query``, ``queries``, ``asked``) comes once for the whole prompt, with the
    forward that ends it, in however many pieces the prompt was read; all queries that the scorer asked for are there.

    Attributes:
        mass: attention mass by window, summed over those queries of this forward that the scorer asked for; 0 in a lane
            in which it asked for none; None unless ``Need.MASS`` is declared, and where ``observe_tokens`` leaves the
            forward out in all lanes.
        stands_for: how many queries each of these stands for: ``prompt_stride`` in the prompt,
            ``period_tokens / observe_tokens`` behind it, 1 where all are asked for. A scorer that adds masses up
            multiplies by it, so that sums of few and of many queries compare.
        keys: the forward's new keys as the model rotated them; None unless ``Need.KEYS`` is declared.
        values: the forward's new values; None unless ``Need.VALUES`` is declared.
        columns: column of the window that each new token fell into; -1 for sinks and pads.
        windows: number of columns.
        lanes_per_row: lanes of one row, one after another.
        ends_prompt: the prompt ends with this forward.
        mass_by_query: attention mass by query and window; None unless ``Need.MASS_BY_QUERY`` is declared.
        queries: the queries themselves, as the model rotated them; None unless ``Need.QUERIES`` is declared.
        asked: true position of each of these queries; -1 for those that the lane was not asked for, which mean nothing.
        positions: first true position of each column's window, -1 for filler; None unless ``Need.POSITIONS`` is
            declared.
        first: lanes of which this forward shows the first queries since their last event; None where there are none, in
            the prompt, and unless ``Need.FIRST_LOOKS`` is declared.
        held: everything that is held; with ``Need.PROMPT`` given with the forward that ends the prompt, with
            ``Need.HELD`` with every forward that ends in a routing event of some row; None otherwise.
        rotary: turns keys and queries; None unless ``Need.ROTARY`` is declared.
        output: the layer's output projection; None unless ``Need.OUTPUT_PROJECTION`` is declared.
        reconstruction: the highest probability that any token of a repetition of the prompt, read behind it, gives to
            a token of each window, of a softmax over the repeated piece, the sinks before it and the repetition's own
            tokens; 0 where nothing was repeated. It comes before the prompt's event, in as many observations as the
            repetition has pieces; ``columns`` are then those of the repeated tokens. None unless
            ``Need.RECONSTRUCTION`` is declared.
    """

    columns: LaneTokens
    windows: int
    mass: Mass | None = None
    stands_for: float = attrs.field(default=1.0, kw_only=True)
    keys: TokenVectors | None = None
    values: TokenVectors | None = None
    lanes_per_row: int = attrs.field(default=1, kw_only=True)
    ends_prompt: bool = attrs.field(default=False, kw_only=True)
    mass_by_query: MassByQuery | None = attrs.field(default=None, kw_only=True)
    queries: Queries | None = attrs.field(default=None, kw_only=True)
    asked: LaneTokens | None = attrs.field(default=None, kw_only=True)
    positions: LaneWindows | None = attrs.field(default=None, kw_only=True)
    first: Bool[Tensor, " lanes"] | None = attrs.field(default=None, kw_only=True)
    held: Held | None = attrs.field(default=None, kw_only=True)
    rotary: Rotary | None = attrs.field(default=None, kw_only=True)
    output: OutputProjection | None = attrs.field(default=None, kw_only=True)
    reconstruction: Float32[Tensor, "lanes heads group windows"] | None = attrs.field(default=None, kw_only=True)

    @property
    def shows_something(self) -> bool:
        """There is something to learn from it; a scorer that has needs is shown nothing else."""
        shown = (self.mass, self.mass_by_query, self.queries, self.keys, self.values, self.held, self.reconstruction)
        return any(each is not None for each in shown)

    def sum_by_window(self, amounts: Tensor, columns: Tensor | None = None) -> Tensor:
        """Add up ``[lanes, tokens]`` amounts of tokens by the window that each fell into, in fp32.

        On CUDA the order of the additions, and so the last bit, may vary.

        Args:
            amounts: by token.
            columns: of these tokens, such as ``held.columns``; None for the forward's new tokens.
        """
        columns = self.columns if columns is None else columns
        sums = torch.zeros(amounts.shape[0], self.windows + 1, dtype=torch.float32, device=amounts.device)
        into = torch.where(columns < 0, self.windows, columns)
        return sums.scatter_add_(1, into, amounts.float())[:, : self.windows]


@attrs.frozen(eq=False)
class Costs:
    """What windows cost, in bytes.

    Attributes:
        tier_bytes: bytes of one window by tier, bookkeeping included.
        kept: ``[lanes, windows, tiers]``: the ledger keeps codes of this tier for the window while it lives in a hotter
            one, at this tier's bytes; None when no window owns codes, so that plans can be counted on the host.
    """

    tier_bytes: tuple[int, ...]
    kept: Tensor | None = None


@attrs.frozen(eq=False)
class MovePlan:
    """Where every window shall live.

    Attributes:
        place: ``[lanes, windows]``: tier index; the number of tiers for eviction; ``PROTECTED`` where it was.
        counts: windows by lane and tier, where the router knows them without asking the device.
    """

    place: LaneWindows
    counts: tuple[tuple[int, ...], ...] | None = None


@attrs.frozen
class ArraySpec:
    """One named array of a stored block: its shape per (head, slot), and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes per head and slot."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Codes = Mapping[str, Tensor]
"""What a store holds for some windows: named arrays with leading axes ``[heads, windows]``."""

Layout = Mapping[str, ArraySpec]
"""The arrays of a stored block, by name."""


def layout_bytes(layout: Layout) -> int:
    """Bytes of one block per head."""
    return sum(spec.nbytes for spec in layout.values())
