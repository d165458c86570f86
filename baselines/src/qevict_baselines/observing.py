"""What the observation window paid to the tokens before it, query by query."""

import attrs
import torch

from qevict.contracts.values import Observation
from qevict.shapes import LaneMask, LaneWindows, MassByQuery, PerLane


@attrs.frozen(eq=False)
class Observed:
    """Masses of the prompt's last queries.

    Attributes:
        masses: by query; 0 of those that the lane was not asked for.
        queries: how many each lane was asked for, at least 1.
        positions: of the windows.
        before: the windows that begin before the first of these queries; with windows of one token, the tokens before
            the observation window.
    """

    masses: MassByQuery
    queries: PerLane
    positions: LaneWindows
    before: LaneMask


def observed(observation: Observation) -> Observed | None:
    """What is shown where the prompt ends, with ``Need.MASS_BY_QUERY`` and ``Need.POSITIONS``; None elsewhere."""
    if observation.mass_by_query is None:
        return None
    asked, positions = observation.asked, observation.positions
    assert asked is not None
    assert positions is not None
    real = asked >= 0
    first = torch.where(real, asked, torch.iinfo(asked.dtype).max).amin(dim=1, keepdim=True)
    return Observed(
        observation.mass_by_query.masked_fill(~real[:, None, :, None], 0),
        real.sum(dim=1).clamp(min=1),
        positions,
        (positions >= 0) & (positions < first),
    )
