"""What a cache holds, as a value, as JSON and as a table."""

import io
import json
from typing import TYPE_CHECKING, Any

import attrs
import torch

from qevict.contracts.quantizer import Quantizer
from qevict.engine.engine import Engine
from qevict.engine.layer import Layer
from qevict.engine.wiring import Wiring

if TYPE_CHECKING:
    from rich.console import Group

PROTECTED_TIER = "protected"
"""Name, in a report, of the sinks and of the windows that are not ranked yet."""


@attrs.frozen
class Report:
    """What a cache holds now. ``print(report)`` shows a table, :meth:`to_json` gives JSON.

    Attributes:
        tokens: true tokens of each row.
        ruled_layers: layers of the model that the policy rules.
        exact_bytes: bytes of everything allocated.
        paper_bytes: bytes of the ruled layers in the paper's accounting: codes times 1.05, full precision, no
            bookkeeping, and no codes of windows that were promoted.
        full_bytes: what a full cache would hold: every token of the ruled layers in the stored dtype, and the other
            layers as they are.
        budget_bytes: what the rows may hold together in the ruled layers; None for no limit, or no tokens yet.
        overshoot_bytes: how far the cache exceeds the budget: its protected tokens alone are too many, the prompt is
            still coming, rows are below ``min_tokens``, the paper's accounting is billed, or the policy compresses once
            (``route_at="prompt"``) and more tokens have come.
        bytes_by_kind: exact bytes, which add up to ``exact_bytes``: windows in full precision, codes, scales and zero
            points (whatever a code takes beyond its bits, and what the codes of a sequence share), ledger copies (codes
            of windows that live in a hotter tier),
            free slots, sinks, waiting queries (of a prompt that is read in pieces, which the scorer wants to see at its
            end), scorer state, tables (identity, place, slots, extents), clock and rotary table, and the
            layers that are not ruled: those with a sliding window stay the library's own, outside of the budget.
        bytes_by_tier: bytes of the windows that live in each tier; the sinks and the windows not ranked yet are
            ``"protected"``.
        windows: live windows by tier, and those not ranked yet (room for the tokens until the next event included),
            over all lanes and layers.
        promotions: windows that moved to a hotter tier, over all lanes and layers.
        demotions: windows that moved to a colder tier.
        evictions: windows that went for good.
        dtype: in which full precision is stored.
        backend: name of the attention backend.
        backend_reason: why it is that one.
    """

    tokens: tuple[int, ...]
    ruled_layers: int
    exact_bytes: int
    paper_bytes: int
    full_bytes: int
    budget_bytes: int | None
    overshoot_bytes: int
    bytes_by_kind: dict[str, int]
    bytes_by_tier: dict[str, int]
    windows: dict[str, int]
    promotions: int
    demotions: int
    evictions: int
    dtype: str
    backend: str
    backend_reason: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data, under the names of the attributes."""
        return attrs.asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """The same as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    def __rich__(self) -> "Group":
        from qevict.engine.tables import report_table

        return report_table(self)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=100, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def make_report(engine: Engine, unruled_bytes: int = 0) -> Report:
    """Read a cache's state; asks the device for the number of windows by tier.

    Args:
        engine: the ruled layers.
        unruled_bytes: what the other layers of the cache hold.

    Raises:
        InterruptedCacheError: a forward over the cache broke off half way.
    """
    engine.check_whole()
    geometry, policy = engine.wiring.geometry, engine.wiring.policy
    tokens = engine.clock.tokens
    token_bytes = geometry.token_bytes * geometry.layers
    budget = None
    if policy.budget is not None and tokens:
        budget = sum(policy.budget.row_bytes(own, token_bytes) for own in tokens)
    exact, totals, windows = engine.nbytes, [layer.totals for layer in engine.layers], _windows(engine)
    return Report(
        tokens=tokens,
        ruled_layers=geometry.layers,
        exact_bytes=exact + unruled_bytes,
        paper_bytes=_paper_bytes(engine),
        full_bytes=sum(tokens) * token_bytes + unruled_bytes,
        budget_bytes=budget,
        overshoot_bytes=0 if budget is None else max(0, exact - budget),
        bytes_by_kind=_bytes_by_kind(engine) | {"layers not ruled": unruled_bytes},
        bytes_by_tier=bytes_by_tier(engine.wiring, windows, sum(map(_sink_bytes, engine.layers))),
        windows=windows,
        promotions=sum(total.promotions for total in totals),
        demotions=sum(total.demotions for total in totals),
        evictions=sum(total.evictions for total in totals),
        dtype=str(geometry.dtype).removeprefix("torch."),
        backend=engine.wiring.backend.name,
        backend_reason=engine.wiring.choice.reason,
    )


def _bytes_by_kind(engine: Engine) -> dict[str, int]:
    wiring, layers = engine.wiring, engine.layers
    kinds = dict.fromkeys(
        ("full precision", "codes", "scales and zero points", "ledger copies", "free slots", "sinks",
         "waiting queries", "scorer state", "tables"), 0
    )  # fmt: skip
    for layer in layers:
        living = [sum(lanes) for lanes in layer.records.counts]
        kinds["full precision"] += living[0] * wiring.block_bytes[0]
        for segment, codec in enumerate(wiring.codecs, start=1):
            codes = living[segment] * _code_bytes(layer, codec)
            kinds["codes"] += codes
            kinds["scales and zero points"] += living[segment] * wiring.block_bytes[segment] - codes
            kinds["ledger copies"] += (sum(layer.live[segment]) - living[segment]) * wiring.block_bytes[segment]
        used = sum(sum(live) * block for live, block in zip(layer.live, wiring.block_bytes, strict=True))
        kinds["scales and zero points"] += layer.shared.nbytes
        kinds["free slots"] += sum(pool.nbytes for pool in layer.pools) - used
        kinds["sinks"] += _sink_bytes(layer)
        kinds["waiting queries"] += 0 if layer.asked is None else layer.asked.nbytes
        state = sum(column.nbytes for column in layer.records.state.values())
        kinds["scorer state"] += state
        kinds["tables"] += layer.records.nbytes - state + sum(mask.nbytes for mask in layer.hidden)
    return kinds | {"clock and rotary table": engine.shared_bytes}


def _code_bytes(layer: Layer, codec: tuple[Quantizer, Quantizer]) -> int:
    """Bytes of the codes alone, keys and values, of one window of one lane."""
    numbers = layer.wiring.heads * layer.wiring.policy.window_tokens * layer.wiring.geometry.head_dim
    return sum(-(-numbers * quantizer.bits // 8) for quantizer in codec)


def _sink_bytes(layer: Layer) -> int:
    return layer.sink_keys.nbytes + layer.sink_values.nbytes


def _windows(engine: Engine) -> dict[str, int]:
    names = [PROTECTED_TIER, *(tier.name for tier in engine.wiring.policy.tiers)]
    places = torch.cat([layer.records.place.long() for layer in engine.layers] or [torch.empty(0, dtype=torch.long)])
    return dict(zip(names, (places + 1).bincount(minlength=len(names)).tolist(), strict=True))


def bytes_by_tier(wiring: Wiring, windows: dict[str, int], sink_bytes: int) -> dict[str, int]:
    """Bytes of so many windows by tier; the sinks count as protected."""
    blocks = (wiring.block_bytes[0], *wiring.block_bytes[wiring.first_segment :])
    tiers = {name: count * block for (name, count), block in zip(windows.items(), blocks, strict=True)}
    return tiers | {PROTECTED_TIER: tiers[PROTECTED_TIER] + sink_bytes}


def _paper_bytes(engine: Engine) -> int:
    """Full precision for sinks, unranked tokens and hot windows; codes times 1.05 for the rest; nothing else."""
    wiring, total = engine.wiring, 0
    for layer in engine.layers:
        sinks = [min(own, wiring.policy.sink_tokens) for own in layer.lane_counts(engine.clock.tokens)]
        unwritten = [
            opened * wiring.policy.window_tokens - max(0, own - wiring.policy.sink_tokens)
            for opened, own in zip(layer.records.opened, layer.lane_counts(engine.clock.tokens), strict=True)
        ]
        total += (sum(sinks) - sum(unwritten)) * wiring.lane_token_bytes
        total += sum(sum(lane) * wiring.paper_bytes(segment) for segment, lane in enumerate(layer.records.counts))
    return total
