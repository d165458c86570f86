"""What a piece of code asks of the device: which operators, how many, and which of them the host waits for."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = frozenset(
    {
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "equal",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
    }
)
"""Operators whose result, or its shape, the host must wait for."""

READING = frozenset({"tolist", "numpy", "cpu", "__array__"})
"""Methods that bring a tensor to the host; on a CPU no operator shows them."""

_MASK_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class Operators(TorchDispatchMode):
    """Counts the operators that run inside it, and those among them that make the host wait for the device.

    Attributes:
        names: operators by name.
        waits: those that synchronise: ``.item()``, ``nonzero``, boolean indexing and the like.
        largest: elements of the largest tensor that an operator returned.

    Example:
        ```python
        import torch
        from qevict.testing import Operators

        with Operators() as seen:
            torch.arange(3).sum().item()
        assert seen.waits
        ```
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.names: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.largest = 0
        self._reads = _Reads(self.waits)

    def __enter__(self) -> "Operators":  # noqa: PYI034 - beartype knows Self only where it decorates whole classes
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call,no-any-return]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._reads.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = func.overloadpacket.__name__
        self.names[name] += 1
        if name in WAITING or (name in _MASK_INDEXED and _has_mask(args[1])) or _unknown_repeats(name, kwargs):
            self.waits[name] += 1
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


class _Reads(TorchFunctionMode):
    """Notes the reading methods."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in READING:
            self._waits[name] += 1
        return func(*args, **(kwargs or {}))


def _has_mask(indices: object) -> bool:
    assert isinstance(indices, Sequence)
    return any(isinstance(index, Tensor) and index.dtype in {torch.bool, torch.uint8} for index in indices)


def _unknown_repeats(name: str, kwargs: Mapping[str, object] | None) -> bool:
    """Whether repeats that only the device knows decide a shape, which no ``output_size`` tells beforehand."""
    return name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
