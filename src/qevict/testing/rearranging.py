"""The same observations and windows: of some lanes only, with columns in another order, or with one column more."""

import attrs
import torch
from torch import Tensor

from qevict.contracts.output import OutputProjection
from qevict.contracts.values import Observation, Windows
from qevict.testing.values import map_tensors


def observed_row(seen: Observation, row: int) -> Observation:
    """What an observation shows of one row."""
    first = row * seen.lanes_per_row
    return _cut(seen, slice(first, first + seen.lanes_per_row))


def observed_lane(seen: Observation, lane: int) -> Observation:
    """What an observation shows of one lane, as if it were a row with no other; heads of other lanes write nothing."""
    alone = attrs.evolve(_cut(seen, slice(lane, lane + 1)), lanes_per_row=1)
    if seen.output is None:
        return alone
    heads = seen.output.kv_heads // seen.lanes_per_row
    of_lane = seen.output.weight.unflatten(0, (seen.lanes_per_row, -1))[lane % seen.lanes_per_row]
    return attrs.evolve(alone, output=OutputProjection(of_lane, heads))


def windows_of(windows: Windows, lanes: slice) -> Windows:
    """Some lanes of a rectangle of windows: one, or all of some rows."""
    cut = map_tensors(lambda tensor: tensor[lanes], windows)
    together = min(windows.lanes_per_row, lanes.stop - lanes.start)
    return attrs.evolve(cut, candidates=windows.candidates[lanes], lanes_per_row=together)


def _cut(seen: Observation, lanes: slice) -> Observation:
    """Some lanes; what a layer has only once stays as it is."""
    cut = map_tensors(lambda tensor: tensor[lanes], attrs.evolve(seen, rotary=None, output=None))
    return attrs.evolve(cut, rotary=seen.rotary, output=seen.output)


def taken(array: Tensor, index: Tensor) -> Tensor:
    """Columns of each lane in another order."""
    return array[torch.arange(len(index), device=array.device)[:, None], index]


def shuffled(seen: Observation, order: Tensor) -> Observation:
    """The same observation of windows in other columns: column ``i`` of a lane is what was column ``order[i]``."""

    def there(columns: Tensor) -> Tensor:
        return torch.where(columns < 0, -1, order.argsort(dim=1).gather(1, columns.clamp(min=0)))

    def by_window(array: Tensor | None) -> Tensor | None:
        return None if array is None else _along_windows(array, order)

    held = seen.held
    return attrs.evolve(
        seen,
        columns=there(seen.columns),
        mass=by_window(seen.mass),
        mass_by_query=by_window(seen.mass_by_query),
        positions=by_window(seen.positions),
        reconstruction=by_window(seen.reconstruction),
        held=None if held is None else attrs.evolve(held, columns=there(held.columns)),
    )


def _along_windows(array: Tensor, order: Tensor) -> Tensor:
    index = order.view(len(order), *[1] * (array.ndim - 2), -1)
    return array.gather(-1, index.expand(array.shape))


def shuffled_windows(windows: Windows, order: Tensor) -> Windows:
    """The same windows in other columns."""
    return attrs.evolve(
        windows,
        positions=_along_windows(windows.positions, order),
        present=_along_windows(windows.present, order),
        candidate=_along_windows(windows.candidate, order),
        place=_along_windows(windows.place, order),
    )


def with_filler(seen: Observation) -> Observation:
    """The same observation with one more column, that nothing fell into."""

    def wider(array: Tensor | None, value: int) -> Tensor | None:
        return None if array is None else torch.nn.functional.pad(array, (0, 1), value=value)

    return attrs.evolve(
        seen,
        windows=seen.windows + 1,
        mass=wider(seen.mass, 0),
        mass_by_query=wider(seen.mass_by_query, 0),
        positions=wider(seen.positions, -1),
        reconstruction=wider(seen.reconstruction, 0),
    )


def filled(windows: Windows) -> Windows:
    """The same windows beside an absent column that claims a far position."""
    far, no = torch.full_like(windows.positions[:, :1], 900), torch.zeros_like(windows.present[:, :1])
    return attrs.evolve(
        windows,
        positions=torch.cat((windows.positions, far), dim=1),
        present=torch.cat((windows.present, no), dim=1),
        candidate=torch.cat((windows.candidate, no), dim=1),
        place=torch.cat((windows.place, torch.full_like(far, -1)), dim=1),
    )
