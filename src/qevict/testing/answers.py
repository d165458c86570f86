"""What attention over a scene is, worked out plainly."""

import attrs
import torch
from torch import Tensor

from qevict.contracts.backend import Query
from qevict.testing.laying import Placed
from qevict.testing.scenes import Scene


@attrs.frozen(eq=False)
class Answer:
    """What attention over a scene is, in double precision.

    Attributes:
        output: ``[lanes, heads, group, queries, head_dim]``.
        lse: ``[lanes, heads, group, queries]``; -inf for pads.
        mass: ``[lanes, heads * group, windows + 1]``, by number of the window.
        protected: ``[lanes, heads * group]``.
    """

    output: Tensor
    lse: Tensor
    mass: Tensor
    protected: Tensor


def plainly_attended(scene: Scene, placed: Placed) -> Answer:
    """Lane after lane and head after head, over whatever is there: as decoded, or as the dense pools round it."""
    case, query = scene.case, scene.query
    answer = Answer(
        torch.zeros(query.vectors.shape, dtype=torch.float64),
        torch.zeros(query.vectors.shape[:4], dtype=torch.float64),
        torch.zeros(case.lanes, case.heads * case.group, case.windows + 1, dtype=torch.float64),
        torch.zeros(case.lanes, case.heads * case.group, dtype=torch.float64),
    )
    for lane in range(case.lanes):
        for head in range(case.heads):
            owners, positions, keys, values = _tokens(scene, placed, lane, head)
            logits = query.vectors[lane, head].double() @ keys.T * query.scaling
            if query.softcap is not None:
                logits = query.softcap * (logits / query.softcap).tanh()
            logits = torch.cat((logits, _sink_logits(query, lane, head)), dim=2)
            positions = torch.cat((positions, positions.new_zeros(logits.shape[2] - len(positions))))
            logits = logits.masked_fill(positions > query.positions[lane, :, None], -torch.inf)
            shares = logits.softmax(-1).nan_to_num(nan=0.0)[..., : len(owners)]  # a pad sees nothing
            answer.output[lane, head] = shares @ values
            answer.lse[lane, head] = logits.logsumexp(-1)
            own = slice(head * case.group, (head + 1) * case.group)
            by_token = shares.sum(1)
            answer.protected[lane, own] = by_token[:, owners < 0].sum(-1)
            answer.mass[lane, own] = by_token.new_zeros(case.group, case.windows + 1).index_add(
                1, owners[owners >= 0], by_token[:, owners >= 0]
            )
    return answer


def _sink_logits(query: Query, lane: int, head: int) -> Tensor:
    """``[group, queries, 1]``, or ``[group, queries, 0]`` where there are none; seen as if they stood at position 0."""
    group, queries = query.vectors.shape[2:4]
    if query.sink_logits is None:
        return torch.zeros(group, queries, 0, dtype=torch.float64)
    return query.sink_logits[lane, head].double()[:, None, None].expand(-1, queries, -1)


def _tokens(scene: Scene, placed: Placed, lane: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Window (-1 for a sink), position, key and value of every token that is there."""
    length, case = int(scene.lengths[lane]), scene.case
    sinks = min(case.sinks, length)
    owners, positions = [-1] * sinks, [*range(sinks)]
    keys, values = [scene.sink_keys[lane, head, :sinks].double()], [scene.sink_values[lane, head, :sinks].double()]
    for window in range(case.windows + 1):
        written = min(scene.window_tokens, length - scene.first(window))
        if scene.kept[lane][window] and written > 0:
            owners += [window] * written
            positions += [scene.first(window) + step for step in range(written)]
            stored = case.dtype if window in placed.densely(lane) else torch.float32
            keys.append(scene.keys[head, scene.block(lane, window), :written].to(stored).double())
            values.append(scene.values[head, scene.block(lane, window), :written].to(stored).double())
    return (torch.tensor(owners).long(), torch.tensor(positions).long(), torch.cat(keys), torch.cat(values))
