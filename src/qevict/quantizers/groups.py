"""Which numbers of a window share a scale and a zero point. Windows lie channel by channel: ``[head_dim, window]``."""

from abc import ABC, abstractmethod

import attrs
import torch
from torch import Tensor


class Groups(ABC):
    """How a window falls into groups."""

    @property
    def channels(self) -> int | None:
        """Channels of a token that share a grid; None where a whole channel of a window does, or a whole token."""
        return None

    @abstractmethod
    def count(self, window_tokens: int, head_dim: int) -> int:
        """Groups of one window."""

    @abstractmethod
    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest number of each group of ``[..., head_dim, window]``: ``[..., groups]``."""

    @abstractmethod
    def sums(self, x: Tensor) -> Tensor:
        """The sum over each group, likewise; in fp64, so that it does not depend on what is summed beside it."""

    @abstractmethod
    def spread(self, numbers: Tensor, head_dim: int) -> Tensor:
        """``[..., groups]`` so that they broadcast with ``[..., head_dim, window]``."""


@attrs.frozen
class ByChannel(Groups):
    """Each channel is a group, over the tokens of a window."""

    def count(self, window_tokens: int, head_dim: int) -> int:
        return head_dim

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.amin(-1), x.amax(-1)

    def sums(self, x: Tensor) -> Tensor:
        return x.sum(-1, dtype=torch.float64)

    def spread(self, numbers: Tensor, head_dim: int) -> Tensor:
        return numbers.unsqueeze(-1)


@attrs.frozen
class ByToken(Groups):
    """Each token is a group, or several of neighbouring channels.

    Attributes:
        of_group: channels of a group; None for all of them.
    """

    of_group: int | None

    @property
    def channels(self) -> int | None:
        return self.of_group

    def count(self, window_tokens: int, head_dim: int) -> int:
        return window_tokens * (head_dim // (self.channels or head_dim))

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        grouped = self._grouped(x)
        return grouped.amin(-2).flatten(-2), grouped.amax(-2).flatten(-2)

    def sums(self, x: Tensor) -> Tensor:
        return self._grouped(x).sum(-2, dtype=torch.float64).flatten(-2)

    def _grouped(self, x: Tensor) -> Tensor:
        grouped: Tensor = x.unflatten(-2, (-1, self.channels or x.shape[-2]))
        return grouped

    def spread(self, numbers: Tensor, head_dim: int) -> Tensor:
        if self.channels is None:
            return numbers.unsqueeze(-2)
        groups = numbers.unflatten(-1, (head_dim // self.channels, -1)).unsqueeze(-2)
        spread: Tensor = groups.expand(*groups.shape[:-2], self.channels, -1).flatten(-3, -2)
        return spread
