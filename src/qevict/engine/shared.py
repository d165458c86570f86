"""What the codes of a lane have in common: the statistics that a quantizer does not keep by window."""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from qevict.contracts.values import Codes
from qevict.engine.wiring import Wiring
from qevict.transfer import to_device


@attrs.frozen(eq=False)
class Shared:
    """Arrays ``[heads, lanes, ...]`` by pool and name; a lane's mean nothing while it has no codes there."""

    arrays: tuple[dict[str, Tensor], ...]

    @classmethod
    def open(cls, wiring: Wiring, lanes: int, device: torch.device) -> "Shared":
        """Nothing fitted yet."""
        return cls(
            tuple(
                {
                    name: torch.zeros(wiring.heads, lanes, *spec.shape, dtype=spec.dtype, device=device)
                    for name, spec in layout.items()
                }
                for layout in wiring.shared_layouts
            )
        )

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], segments: int) -> "Shared":
        """The inverse of :meth:`tensors`."""
        names = [f"shared.{segment}." for segment in range(segments)]
        return cls(
            tuple({name.removeprefix(own): tensors[name] for name in tensors if name.startswith(own)} for own in names)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for own in self.arrays for array in own.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every array under a name of its own."""
        for segment, own in enumerate(self.arrays):
            for name, array in own.items():
                yield f"shared.{segment}.{name}", array

    def selected(self, lanes: Tensor) -> "Shared":
        """Those of some lanes, in that order."""
        return Shared(tuple({name: array[:, lanes] for name, array in own.items()} for own in self.arrays))

    def by_slot(self, segment: int, regions: Sequence[int]) -> Codes:
        """What each slot of a pool shares with its lane; a lane alone is not copied."""
        arrays = self.arrays[segment]
        if len(regions) == 1:
            return {name: array.expand(-1, regions[0], *array.shape[2:]) for name, array in arrays.items()}
        if not arrays:
            return {}
        counts, total = to_device(regions, next(iter(arrays.values())).device), sum(regions)
        return {name: array.repeat_interleave(counts, 1, output_size=total) for name, array in arrays.items()}
