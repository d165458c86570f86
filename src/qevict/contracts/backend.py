"""The attention backend: attends over whatever mixture results."""

from abc import ABC, abstractmethod
from typing import ClassVar

import attrs
import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from qevict.contracts.quantizer import Quantizer
from qevict.contracts.rotary import Rotary
from qevict.contracts.values import Codes, Need
from qevict.shapes import (
    BlockPool,
    LaneMask,
    LaneTokens,
    LaneWindows,
    Mass,
    MassByQuery,
    PerLane,
    Queries,
    TokenVectors,
)


@attrs.frozen(eq=False)
class EncodedSegment:
    """Windows that live as codes.

    Attributes:
        keys: quantizer of the (pre-RoPE) keys.
        values: quantizer of the values.
        key_codes: the pool's key arrays ``[heads, slots, ...]``, lent.
        value_codes: the pool's value arrays, lent.
        slots: slot of each window of each lane; any valid slot where absent.
        regions: slots of the pool that belong to each lane, known on the host; they follow one another.
        hidden: True for slots of the pool that hold no window of this view.
    """

    keys: Quantizer
    values: Quantizer
    key_codes: Codes
    value_codes: Codes
    slots: LaneWindows
    regions: tuple[int, ...]
    hidden: Bool[Tensor, " slots"]


@attrs.frozen(eq=False)
class View:
    """Everything that one layer's lanes can attend to, as segments with per-lane extents.

    The columns of ``windows`` and ``present`` run over the dense windows first, then over each encoded segment; those
    of a segment ascend in position, filler last.

    Attributes:
        sink_keys: rotated keys of the sinks, ``[lanes, heads, sinks, head_dim]``.
        sink_values: values of the sinks.
        keys: pool of rotated dense keys.
        values: pool of dense values.
        slots: dense slot of each dense window.
        regions: slots of the dense pool that belong to each lane, known on the host; they follow one another, so that
            a lane can be read in place.
        hidden: True for tokens of the dense pool that are not written yet, or belong to no window of this view.
        encoded: segments that live as codes.
        windows: index of every window in its row.
        present: False for filler columns; None if there are none.
        lengths: true tokens of each lane; a stored token counts only below its lane's length.
        rotary: to turn decoded keys; None where nothing is encoded.
        rotary_offset: rotary minus true position, by lane.
    """

    sink_keys: TokenVectors
    sink_values: TokenVectors
    keys: BlockPool
    values: BlockPool
    slots: LaneWindows
    regions: tuple[int, ...]
    hidden: Bool[Tensor, "slots window"]
    encoded: tuple[EncodedSegment, ...]
    windows: LaneWindows
    present: LaneMask | None
    lengths: PerLane
    rotary: Rotary | None
    rotary_offset: PerLane

    @property
    def positions(self) -> LaneWindows:
        """First true position of every window."""
        return self.windows.long() * self.keys.shape[2] + self.sink_keys.shape[2]

    @property
    def absent(self) -> LaneMask:
        """True for filler columns."""
        none = torch.zeros(self.windows.shape, dtype=torch.bool, device=self.windows.device)
        return none if self.present is None else ~self.present


@attrs.frozen
class Known:
    """What the host knows of some queries, so that neither it nor the device need look. The defaults claim nothing.

    Query ``i`` of ``n`` that is no pad has, in every lane, a position

    * of at most ``longest - 1 - spacing * (n - 1 - i)``,
    * and of at least ``shortest - 1 - spacing * (n - 1 - i)``.

    Attributes:
        longest: for the upper bound: no lane is longer; None for no bound.
        shortest: for the lower bound: every lane is as long, and keeps all its tokens, in order, up to there.
        spacing: tokens from one query to the next.
    """

    longest: int | None = None
    shortest: int = 0
    spacing: int = 1


@attrs.frozen(eq=False)
class Query:
    """The queries of one forward.

    Attributes:
        vectors: rotated queries.
        positions: true position of each query; -1 for pads, which see nothing and give no mass. Where masses alone are
            asked for, queries that the scorer leaves out are pads too; pads come before a lane's other queries.
        scaling: factor on the dot products.
        padded: some query is a pad, for all that the host knows.
        known: bounds of the positions.
        softcap: scaled dot products become ``softcap * tanh(product / softcap)`` before the softmax (Gemma 2,
            arXiv 2408.00118, section 2); None leaves them as they are.
        sink_logits: one more logit of each query head, which takes part in the softmax and carries no value (the sinks
            that GPT-OSS learns); it is neither scaled nor capped, and pads do not see it. None where there are none.
    """

    vectors: Queries
    positions: LaneTokens
    scaling: float
    padded: bool = True
    known: Known = Known()
    softcap: float | None = None
    sink_logits: Float32[Tensor, "lanes heads group"] | None = None


@attrs.frozen(eq=False)
class Attended:
    """What attention gives back.

    Attributes:
        output: ``[lanes, heads, group, tokens, head_dim]`` in the dtype of the queries.
        lse: natural log-sum-exp of the logits, capped as they are and the sink logit among them, per query; minus
            infinity for pads.
        mass: by window, summed over the queries; None if not asked for.
        protected_mass: on the sinks, summed over the queries; None if not asked for.
    """

    output: Queries
    lse: Float32[Tensor, "lanes heads group tokens"]
    mass: Mass | None = None
    protected_mass: Float32[Tensor, "lanes q_heads"] | None = None


@attrs.frozen
class Setting:
    """What a backend is to serve.

    Attributes:
        device: where attention runs.
        dtype: dtype in which full precision is stored.
        window_tokens: tokens of a window.
        codecs: quantizers of keys and values of the encoded tiers.
        head_dim: channels of a key.
        partial_rotary: only some channels of a key turn with its position.
        softcap: what caps the logits of the model; None where nothing does.
    """

    device: torch.device
    dtype: torch.dtype
    window_tokens: int
    codecs: tuple[tuple[Quantizer, Quantizer], ...]
    head_dim: int
    partial_rotary: bool = False
    softcap: float | None = None


class AttentionBackend(ABC):
    """Attends over dense and encoded segments. A frozen value.

    Laws:
        * The output equals fp32 softmax attention over the decoded keys and values: causal in true positions, within
          1e-5 for fp32 and a few ulp for 16-bit dtypes.
        * Logits are capped before the softmax if the query says so.
        * Sink logits take part in the softmax and carry no value: what they get is missing from output and masses.
        * Splitting or ordering segments differently changes nothing beyond that tolerance.
        * Mass of all windows and ``protected_mass`` add up to the number of (non-pad) queries, per query head; sink
          logits take their share from it.
        * ``mass`` alone equals the mass of ``attend`` and never holds an L x L matrix.
        * ``mass_by_query``, summed over the queries, equals ``mass``.
        * Filler columns and unwritten tokens get a probability of exactly 0.
        * No host synchronisation: every step attends.

    Attributes:
        provides: what a scorer may need of this backend.
    """

    name: ClassVar[str]
    provides: ClassVar[frozenset[Need]]

    def reason(self, setting: Setting) -> str | None:
        """Why this backend is a good choice where a policy names none, in words for a report; None if it is not."""
        return None

    @abstractmethod
    def attend(self, query: Query, view: View, *, want_mass: bool) -> Attended:
        """Attend; with ``want_mass`` also report where the probability went."""

    @abstractmethod
    def mass(self, query: Query, view: View) -> Mass:
        """The masses only: a second pass beside attention that somebody else computed."""

    def mass_by_query(self, query: Query, view: View) -> MassByQuery:
        """The masses of each query by itself; meant for a few queries, such as the last of a prompt."""
        vectors, positions = query.vectors.split(1, dim=3), query.positions.split(1, dim=1)
        each = (
            attrs.evolve(query, vectors=own, positions=at, known=Known())
            for own, at in zip(vectors, positions, strict=True)
        )
        return torch.stack([self.mass(one, view) for one in each], dim=2)
