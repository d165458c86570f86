"""Which numbers share a grid: against loops over single groups."""

import pytest
import torch
from torch import Tensor

from qevict.quantizers.groups import ByChannel, ByToken, Groups

HEAD_DIM, WINDOW = 12, 5


def members(groups: Groups, x: Tensor) -> list[Tensor]:
    """Numbers of each group of ``[head_dim, window]``, in order."""
    if isinstance(groups, ByChannel):
        return list(x)
    assert isinstance(groups, ByToken)
    return [tokens for channels in x.split(groups.channels or HEAD_DIM) for tokens in channels.T]


@pytest.mark.parametrize("groups", [ByChannel(), ByToken(None), ByToken(4), ByToken(1), ByToken(12)], ids=repr)
def test_ends_are_those_of_the_members_and_spread_over_them(groups: Groups) -> None:
    x = torch.randn(2, 3, HEAD_DIM, WINDOW, generator=torch.Generator().manual_seed(0))
    low, high = groups.ends(x)
    assert low.shape == high.shape == (2, 3, groups.count(WINDOW, HEAD_DIM))
    own = members(groups, x[1, 2])
    assert low[1, 2].tolist() == [float(each.min()) for each in own]
    assert high[1, 2].tolist() == [float(each.max()) for each in own]
    torch.testing.assert_close(groups.sums(x)[1, 2], torch.stack([each.double().sum() for each in own]))
    assert torch.equal(groups.sums(x[1:, 2:]), groups.sums(x)[1:, 2:])
    spread = groups.spread(low, HEAD_DIM).expand_as(x)
    for group, numbers in enumerate(members(groups, spread[1, 2])):
        assert (numbers == low[1, 2, group]).all()


def test_a_group_tells_how_many_channels_of_a_token_it_has() -> None:
    assert ByChannel().channels is None
    assert ByToken(None).channels is None
    assert ByToken(4).channels == 4
