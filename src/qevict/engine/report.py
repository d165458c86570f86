"""What a cache holds, as a value."""

import attrs
import torch

from qevict.engine.engine import Engine


@attrs.frozen
class Report:
    """What a cache holds now.

    Attributes:
        tokens: true tokens of each row.
        exact_bytes: bytes of everything allocated.
        paper_bytes: bytes in the paper's accounting: codes times 1.05, full precision, no bookkeeping, and no codes of
            windows that were promoted.
        full_bytes: what a full cache in the stored dtype would hold.
        budget_bytes: what the rows may hold together; None for no limit.
        overshoot_bytes: how far the cache exceeds the budget: its protected tokens alone are too many, the prompt is
            still coming, rows are below ``min_tokens``, or the paper's accounting is billed.
        bytes_by_kind: exact bytes: each pool, sinks, records, and what the clock and the rotary table take.
        windows: live windows by tier, and those not ranked yet, over all lanes and layers.
        promotions: windows that moved to a hotter tier, over all lanes and layers.
        demotions: windows that moved to a colder tier.
        evictions: windows that went for good.
        backend: name of the attention backend.
    """

    tokens: tuple[int, ...]
    exact_bytes: int
    paper_bytes: int
    full_bytes: int
    budget_bytes: int | None
    overshoot_bytes: int
    bytes_by_kind: dict[str, int]
    windows: dict[str, int]
    promotions: int
    demotions: int
    evictions: int
    backend: str


def make_report(engine: Engine) -> Report:
    """Read a cache's state; asks the device for the number of windows by tier."""
    geometry, policy = engine.wiring.geometry, engine.wiring.policy
    tokens = engine.clock.tokens
    token_bytes = geometry.token_bytes * geometry.layers
    budget = None
    if policy.budget is not None:
        budget = sum(policy.budget.row_bytes(own, token_bytes) for own in tokens)
    exact, totals = engine.nbytes, [layer.totals for layer in engine.layers]
    return Report(
        tokens=tokens,
        exact_bytes=exact,
        paper_bytes=_paper_bytes(engine),
        full_bytes=sum(tokens) * token_bytes,
        budget_bytes=budget,
        overshoot_bytes=0 if budget is None else max(0, exact - budget),
        bytes_by_kind=_bytes_by_kind(engine),
        windows=_windows(engine),
        promotions=sum(total.promotions for total in totals),
        demotions=sum(total.demotions for total in totals),
        evictions=sum(total.evictions for total in totals),
        backend=policy.backend.name,
    )


def _bytes_by_kind(engine: Engine) -> dict[str, int]:
    names = ["full precision", *(f"{tier.name} codes" for tier in engine.wiring.policy.tiers if tier.codec)]
    kinds = {name: sum(layer.pools[index].nbytes for layer in engine.layers) for index, name in enumerate(names)}
    kinds["sinks"] = sum(layer.sink_keys.nbytes + layer.sink_values.nbytes for layer in engine.layers)
    kinds["records"] = sum(layer.records.nbytes for layer in engine.layers)
    kinds["clock and rotary table"] = engine.shared_bytes
    return kinds


def _windows(engine: Engine) -> dict[str, int]:
    names = ["protected", *(tier.name for tier in engine.wiring.policy.tiers)]
    places = torch.cat([layer.records.place.long() for layer in engine.layers] or [torch.empty(0, dtype=torch.long)])
    return dict(zip(names, (places + 1).bincount(minlength=len(names)).tolist(), strict=True))


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
