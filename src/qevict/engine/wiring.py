"""A policy wired to a model: every size and byte price that follows from the two, computed once."""

import math
from functools import cached_property

import attrs
import torch

from qevict.contracts.backend import AttentionBackend, Setting
from qevict.contracts.quantizer import Quantizer
from qevict.contracts.rotary import Rotary
from qevict.contracts.router import LayerBounds, TierRouter
from qevict.contracts.scorer import Scorer
from qevict.contracts.values import ArraySpec, Geometry, Layout, Windows, layout_bytes
from qevict.engine.checks import check_parts, check_rankings, check_start
from qevict.engine.choice import BUILT_IN, Choice, choose
from qevict.errors import PolicyError
from qevict.policy import Policy

PAPER_OVERHEAD = 1.05
"""Factor on codes in the paper's accounting, for scales and zero points (notes on arXiv 2608.05326, section 4.5)."""

_INT64, _INT32, _INT16, _INT8 = 8, 4, 2, 1


@attrs.frozen(eq=False, slots=False)
class Wiring:
    """What the engine knows before the first token.

    Attributes:
        policy: the composition.
        geometry: the model's sizes.
        rotary: turns decoded keys; None where no tier encodes.
        device: where attention runs.
        softcap: what the model caps its logits at; None where it does not.
        offered: backends that plugins offer, which are asked before the built-in ones.
    """

    policy: Policy
    geometry: Geometry
    rotary: Rotary | None
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    softcap: float | None = None
    offered: tuple[AttentionBackend, ...] = ()

    def __deepcopy__(self, _memo: object) -> "Wiring":
        return self

    def __reduce__(self) -> "tuple[type[Wiring], tuple[object, ...]]":
        own = (self.policy, self.geometry, self.rotary, self.device, self.softcap, self.offered)
        return Wiring, own  # the rest follows anew

    @cached_property
    def choice(self) -> Choice:
        """What attends, and why."""
        policy, rotary = self.policy, self.rotary
        partial = rotary is not None and rotary.rotary_dim < self.geometry.head_dim
        setting = Setting(
            self.device,
            self.geometry.dtype,
            policy.window_tokens,
            self.codecs,
            self.geometry.head_dim,
            softcap=self.softcap,
            partial_rotary=partial,
        )
        return choose(self.policy, setting, (*self.offered, *BUILT_IN))

    @property
    def backend(self) -> AttentionBackend:
        """What attends."""
        return self.choice.backend

    def check(self) -> None:
        """Find out now what the sizes do not allow.

        Raises:
            PolicyError: a quantizer cannot serve this model, or windows of this head_dim, or the router reads a ranking
                that the scorer does not offer.
        """
        _ = self.layouts, self.shared_layouts
        for codec in self.codecs:
            for quantizer in codec:
                quantizer.check(self.geometry)
        _check_rankings(self.policy.scorer, self.policy.router)

    @cached_property
    def lanes_per_row(self) -> int:
        """1, or the number of KV heads."""
        return 1 if self.policy.granularity == "row" else self.geometry.kv_heads

    @cached_property
    def heads(self) -> int:
        """KV heads in one lane."""
        return self.geometry.kv_heads // self.lanes_per_row

    def heads_of(self, lane: int) -> tuple[int, ...]:
        """KV heads of a lane."""
        first = lane % self.lanes_per_row * self.heads
        return tuple(range(first, first + self.heads))

    @cached_property
    def codecs(self) -> tuple[tuple[Quantizer, Quantizer], ...]:
        """Quantizers of the encoded tiers, hot to cold."""
        return tuple(tier.codec for tier in self.policy.tiers if tier.codec is not None)

    @cached_property
    def segments(self) -> int:
        """Pools of one layer: the dense pool, then one for each encoded tier."""
        return 1 + len(self.codecs)

    @cached_property
    def first_segment(self) -> int:
        """Segment of tier 0: the dense pool if it keeps full precision."""
        return self.segments - len(self.policy.tiers)

    def segment_of(self, place: torch.Tensor) -> torch.Tensor:
        """Segment of each place; protected windows live in the dense pool."""
        return (place + self.first_segment).clamp(min=0)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Arrays of one block in each segment; keys and values apart."""
        window, head_dim = self.policy.window_tokens, self.geometry.head_dim
        dense = ArraySpec((window, head_dim), self.geometry.dtype)
        coded = (
            {f"keys.{name}": spec for name, spec in keys.layout(window, head_dim).items()}
            | {f"values.{name}": spec for name, spec in values.layout(window, head_dim).items()}
            for keys, values in self.codecs
        )
        return ({"keys": dense, "values": dense}, *coded)

    @cached_property
    def shared_layouts(self) -> tuple[Layout, ...]:
        """Arrays that all windows of one KV head of a row have in common in each segment; keys and values apart."""
        head_dim = self.geometry.head_dim
        coded = (
            {f"keys.{name}": spec for name, spec in keys.shared_layout(head_dim).items()}
            | {f"values.{name}": spec for name, spec in values.shared_layout(head_dim).items()}
            for keys, values in self.codecs
        )
        return ({}, *coded)

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of one lane's shared arrays, of all segments."""
        return self.heads * sum(map(layout_bytes, self.shared_layouts))

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one window of one lane in each segment."""
        return tuple(self.heads * layout_bytes(layout) for layout in self.layouts)

    @cached_property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of one slot in each segment: a block, and the flags that hide what is not written or free."""
        flags = (self.policy.window_tokens, *(1 for _ in self.codecs))
        return tuple(block + _INT8 * own for block, own in zip(self.block_bytes, flags, strict=True))

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of bookkeeping per live window: identity, place, count of moves, slots, scorer state."""
        state = self.policy.scorer.start(1, 1, torch.device("cpu"))
        own = sum(tensor.nbytes for tensor in state.values())
        return _INT32 + _INT8 + _INT16 + _INT32 * self.segments + own

    @cached_property
    def sink_bytes(self) -> int:
        """Bytes of one lane's sinks."""
        return self.policy.sink_tokens * self.lane_token_bytes

    @cached_property
    def lane_token_bytes(self) -> int:
        """Bytes of one full-precision token of one lane."""
        return self.geometry.token_bytes // self.lanes_per_row

    @cached_property
    def lane_bytes(self) -> int:
        """Bytes per lane: extents of its segments, windows opened, and what its windows share as codes."""
        return 2 * _INT64 * self.segments + _INT64 + self.shared_bytes

    @cached_property
    def row_bytes(self) -> int:
        """Bytes per row held once per cache: its length and offset, two flags, and the shared rotary table."""
        table = 0 if self.rotary is None else self.rotary.inverse_frequencies.nbytes
        return 2 * (_INT64 + _INT8) + table

    @cached_property
    def tier_bytes(self) -> tuple[int, ...]:
        """What one window of one lane is billed in each tier."""
        if self.policy.accounting == "paper":
            return tuple(self.paper_bytes(segment) for segment in range(self.first_segment, self.segments))
        return tuple(slot + self.record_bytes for slot in self.slot_bytes[self.first_segment :])

    def paper_bytes(self, segment: int) -> int:
        """Bytes of one window of one lane in the paper's accounting."""
        dense = self.policy.window_tokens * self.lane_token_bytes
        if segment == 0:
            return dense
        keys, values = self.codecs[segment - 1]
        return math.ceil(dense * (keys.bits + values.bits) / 2 / (8 * self.geometry.dtype.itemsize) * PAPER_OVERHEAD)

    @property
    def unranked_tokens(self) -> int:
        """Tokens of a row up to which nothing is ranked, so that all are kept."""
        return self.policy.sink_tokens + self.policy.protected_tokens

    @cached_property
    def reserve_windows(self) -> int:
        """Most windows that a lane holds unranked: the recent region, and room until the next event.

        After an event up to ``window - 1`` tokens behind the recent ones have not aged, and ``period`` more come until
        the next event has run.
        """
        policy = self.policy
        tokens = policy.protected_tokens + policy.window_tokens - 1 + policy.period_tokens
        return -(-tokens // policy.window_tokens)

    @cached_property
    def reserve_bytes(self) -> int:
        """Bytes of a lane that no router sees: sinks, unranked windows, bookkeeping."""
        if self.policy.accounting == "paper":
            return (self.policy.sink_tokens + self.policy.protected_tokens) * self.lane_token_bytes
        return self.sink_bytes + self.lane_bytes + self.reserve_windows * (self.slot_bytes[0] + self.record_bytes)

    def windows_until(self, tokens: int) -> int:
        """Windows that the first ``tokens`` tokens of a row reach into."""
        return max(0, -(-(tokens - self.policy.sink_tokens) // self.policy.window_tokens))

    def aged_until(self, tokens: int) -> int:
        """Windows of a row of ``tokens`` tokens that lie wholly before its recent region; none below ``min_tokens``."""
        policy = self.policy
        if tokens < policy.min_tokens:
            return 0
        return max(0, (tokens - self.unranked_tokens) // policy.window_tokens)

    def capacity(self, budget: int | None) -> int | None:
        """Bytes of a lane's budget that its router may fill; None for no limit.

        Where nothing is protected there is room for one window, however small the budget, so that something stays.
        """
        least = 0 if self.unranked_tokens else self.tier_bytes[0]
        return None if budget is None else max(least, budget - self.reserve_bytes)

    def whole_lane_bytes(self, tokens: int) -> int:
        """Most bytes of a lane of a row of ``tokens`` tokens that keeps all its windows in full precision."""
        windows = -(-max(0, tokens - self.policy.sink_tokens) // self.policy.window_tokens) + self.reserve_windows
        return self.sink_bytes + self.lane_bytes + windows * (self.slot_bytes[0] + self.record_bytes)

    def lane_budgets(self, tokens: int) -> tuple[int | None, ...]:
        """Bytes that one lane of a row of ``tokens`` tokens may take, by layer; None for no limit."""
        layers, policy = self.geometry.layers, self.policy
        if not layers:
            return ()
        if policy.budget is None or tokens < policy.min_tokens:
            return (None,) * layers
        total = policy.budget.row_bytes(stepped(tokens), self.geometry.token_bytes * layers)
        if policy.accounting == "exact":
            total -= self.row_bytes
        total = max(total, 0)
        shares = policy.router.share(total, self.geometry, self.layer_bounds(tokens))
        check_parts(policy.router.name, shares, layers, total)
        return tuple(share // self.lanes_per_row for share in shares)

    def layer_bounds(self, tokens: int) -> LayerBounds:
        """What a layer of a row of ``tokens`` tokens takes at least and at most."""
        least = self.reserve_bytes
        most = least + self.aged_until(tokens) * self.tier_bytes[0]
        return LayerBounds(self.lanes_per_row * least, self.lanes_per_row * most)


def stepped(tokens: int) -> int:
    """``tokens`` rounded down to a step between 1/128 and 1/64 of itself.

    Budgets that follow the length grow in these steps, so that pools are laid out anew rarely and what that copies
    stays proportional to the tokens that came.
    """
    step = max(0, tokens.bit_length() - 7)
    return tokens >> step << step


def _check_rankings(scorer: Scorer, router: TierRouter) -> None:
    """One window of which nothing was observed shows what a scorer offers."""
    there, position = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.int64)
    windows = Windows(position, there, there, position, (1,), lengths=position[0] + 1)
    start = scorer.start(1, 1, position.device)
    check_start(scorer.name, start)
    offered = scorer.rank(start, windows)
    check_rankings(scorer.name, offered, windows)
    if missing := [name for name in router.rankings if name not in offered]:
        msg = (
            f"router {router.name!r} reads the ranking {', '.join(map(repr, missing))}, scorer {scorer.name!r} offers "
            f"{', '.join(map(repr, offered))}; use a scorer that offers it, or another router"
        )
        raise PolicyError(msg)
