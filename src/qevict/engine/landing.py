"""Where the tokens of one forward fall: worked out once, and the same in every layer."""

import attrs
import torch
from torch import Tensor

from qevict.engine.clock import Arrival
from qevict.engine.wiring import Wiring
from qevict.transfer import to_device


@attrs.frozen(eq=False)
class Landing:
    """New tokens by lane; pads go nowhere.

    Attributes:
        positions: ``[lanes, tokens]`` true positions, -1 for pads.
        window: ``[lanes, tokens]`` index of each token's window in its row; below 0 for sinks and pads.
        before: true tokens of each lane before this forward.
        lengths: likewise after it.
        rotary_offset: rotary minus true position, by lane.
        of_windows: which tokens fall into windows; None for all of all lanes.
        step: place inside its window of each token of ``of_windows``.
        of_sinks: which tokens are sinks; None if there are none.
        padded: some token is a pad.
    """

    positions: Tensor
    window: Tensor
    before: Tensor
    lengths: Tensor
    rotary_offset: Tensor
    of_windows: "Picked | None"
    step: Tensor
    of_sinks: "Picked | None"
    padded: bool

    def entries(self, rectangles: Tensor) -> Tensor:
        """``[layers, picked]`` entries of ``[layers, lanes, tokens]`` for the tokens of windows."""
        picked = self.of_windows
        return rectangles.flatten(1) if picked is None else rectangles[:, picked.lane, picked.token]

    def vectors(self, vectors: Tensor) -> Tensor:
        """Rows of ``[lanes, heads, tokens, head_dim]`` for the tokens of windows, ``[heads, picked, head_dim]``."""
        if self.of_windows is None:
            return vectors.transpose(0, 1).flatten(1, 2)
        return self.of_windows.vectors(vectors).transpose(0, 1)


@attrs.frozen(eq=False)
class Picked:
    """Some of the tokens ``[lanes, tokens]``, in order of lane and token.

    Attributes:
        lane: lane of each.
        token: index of each in the forward.
    """

    lane: Tensor
    token: Tensor

    def vectors(self, vectors: Tensor) -> Tensor:
        """Their rows of ``[lanes, heads, tokens, head_dim]``, ``[picked, heads, head_dim]``."""
        return vectors[self.lane, :, self.token]


def land(wiring: Wiring, arrival: Arrival, offset: Tensor) -> Landing:
    """Sort a forward's tokens into sinks, windows and pads, without asking the device."""
    policy, per_row = wiring.policy, wiring.lanes_per_row
    positions = per_lane(arrival.positions, per_row)
    inside = positions - policy.sink_tokens
    rows = list(zip(arrival.before, arrival.after, strict=True))
    sinks = sum(min(policy.sink_tokens, new) - min(policy.sink_tokens, old) for old, new in rows) * per_row
    windowed = sum(new - old for old, new in rows) * per_row - sinks
    of_windows = None if windowed == inside.numel() else _pick(inside >= 0, windowed)
    step = inside % policy.window_tokens
    return Landing(
        positions=positions,
        window=torch.div(inside, policy.window_tokens, rounding_mode="floor"),
        before=to_device([own for own in arrival.before for _ in range(per_row)], positions.device),
        lengths=per_lane(arrival.lengths, per_row),
        rotary_offset=per_lane(offset, per_row),
        of_windows=of_windows,
        step=step.flatten() if of_windows is None else step[of_windows.lane, of_windows.token],
        of_sinks=_pick((positions >= 0) & (inside < 0), sinks) if sinks else None,
        padded=sinks + windowed != positions.numel(),
    )


def _pick(wanted: Tensor, count: int) -> Picked:
    lane, token = torch.nonzero_static(wanted, size=count).unbind(1)
    return Picked(lane, token)


def per_lane(rows: Tensor, lanes_per_row: int) -> Tensor:
    """A tensor over rows, repeated for each of their lanes."""
    return rows if lanes_per_row == 1 else rows.repeat_interleave(lanes_per_row, dim=0)
