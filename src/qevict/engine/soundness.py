"""Whether a snapshot that comes from a file is one that an engine can go on from."""

import torch
from torch import Tensor

from qevict.contracts.values import ArraySpec
from qevict.engine.snapshot import COLUMNS, LayerNumbers, Numbers, Snapshot
from qevict.engine.wiring import Wiring
from qevict.transfer import to_device


def forms(wiring: Wiring, numbers: Numbers) -> dict[str, ArraySpec]:
    """Shape and dtype of every tensor of a cache of which the host knows these numbers."""
    rows = len(numbers.tokens)
    if not rows:
        return {}
    expected = {"clock.offset": ArraySpec((rows,), torch.int64), "clock.faults": ArraySpec((2,), torch.bool)}
    for index, own in enumerate(numbers.layers):
        expected |= {f"layers.{index}.{name}": spec for name, spec in _layer_forms(wiring, own).items()}
    return expected


def _layer_forms(wiring: Wiring, numbers: LayerNumbers) -> dict[str, ArraySpec]:
    policy, geometry, lines = wiring.policy, wiring.geometry, sum(map(sum, numbers.counts))
    sinks = (len(numbers.opened), wiring.heads, policy.sink_tokens, geometry.head_dim)
    found = {name: ArraySpec((lines,), dtype) for name, dtype in COLUMNS.items()}
    found |= {"slots": ArraySpec((lines, wiring.segments), torch.int32)}
    found |= {f"sinks.{name}": ArraySpec(sinks, geometry.dtype) for name in ("keys", "values")}
    for name, column in policy.scorer.start(1, 1, torch.device("cpu")).items():
        found[f"state.{name}"] = ArraySpec((lines, *column.shape[2:]), column.dtype)
    for segment, layout in enumerate(wiring.layouts):
        for name, spec in layout.items():
            shape = (wiring.heads, sum(numbers.live[segment]), *spec.shape)
            found[f"pools.{segment}.{name}"] = ArraySpec(shape, spec.dtype)
    for segment, layout in enumerate(wiring.shared_layouts):
        for name, spec in layout.items():
            shape = (wiring.heads, len(numbers.opened), *spec.shape)
            found[f"shared.{segment}.{name}"] = ArraySpec(shape, spec.dtype)
    return found


def disagreement(wiring: Wiring, numbers: Numbers) -> str | None:
    """What is wrong with the numbers; None where they go together."""
    rows, layers = len(numbers.tokens), len(numbers.layers)
    if (len(numbers.since), len(numbers.unbroken)) != (rows, rows) or len(numbers.events) not in {0, rows}:
        return f"tokens of {rows} rows, and events of another number of rows"
    if max(numbers.tokens, default=0) > numbers.seen or bool(rows) != bool(numbers.seen):
        return f"{numbers.seen} tokens seen, and rows of {numbers.tokens}"
    if layers != (wiring.geometry.layers if rows else 0):
        return f"{layers} layers of {rows} rows"
    lanes = rows * wiring.lanes_per_row
    for index, own in enumerate(numbers.layers):
        for name in ("counts", "regions", "live"):
            shape = [len(by_lane) for by_lane in getattr(own, name)]
            if shape != [lanes] * wiring.segments:
                return f"{name} of layer {index} by {shape} lanes, and {wiring.segments} pools of {lanes} lanes"
        if len(own.opened) != lanes or len(own.totals) != 3:
            return f"windows opened in {len(own.opened)} of {lanes} lanes of layer {index}"
    return None


def misplaced(wiring: Wiring, snapshot: Snapshot) -> int | None:
    """The first layer of which a window lies where it cannot; None where each is in its place. Asks the device."""
    for index, numbers in enumerate(snapshot.numbers.layers):
        column = {name: snapshot.tensors[f"layers.{index}.{name}"] for name in ("window", "place", "slots")}
        if not _in_place(wiring, numbers, **column):
            return index
    return None


def _in_place(wiring: Wiring, numbers: LayerNumbers, window: Tensor, place: Tensor, slots: Tensor) -> bool:
    lines, device = slots.shape[0], slots.device
    by_lane = to_device([*zip(*numbers.counts, strict=True)], device)
    segments = torch.arange(wiring.segments, device=device).repeat(by_lane.shape[0])
    segment = segments.repeat_interleave(by_lane.flatten(), output_size=lines)
    lanes = torch.arange(by_lane.shape[0], device=device).repeat_interleave(by_lane.sum(1), output_size=lines)
    sound = (place >= -1).all() & (place < len(wiring.policy.tiers)).all()
    sound &= (wiring.segment_of(place.long()) == segment).all()
    sound &= (slots.gather(1, segment[:, None]) >= 0).all()
    sound &= (window >= 0).all() & (window < to_device(numbers.opened, device)[lanes]).all()
    for index in range(wiring.segments):
        own, regions = slots[:, index].long(), to_device(numbers.regions[index], device)
        used, ends = own >= 0, regions.cumsum(0)
        inside = (own >= (ends - regions)[lanes]) & (own < ends[lanes])
        live = to_device(numbers.live[index], device)
        sound &= (inside | ~used).all() & (lanes[used].bincount(minlength=len(live)) == live).all()
        sound &= torch.tensor(own[used].unique().shape[0] == int(used.sum()), device=device)
    return bool(sound)
