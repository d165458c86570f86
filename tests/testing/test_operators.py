"""What makes the host wait is seen, whatever it is called; what does not is left alone."""

from collections.abc import Callable

import pytest
import torch

from qevict.testing import Operators

X, REPEATS = torch.arange(4.0), torch.tensor([1, 1, 2, 0])

WAIT: dict[str, Callable[[], object]] = {
    "item": X[0].item,
    "bool": lambda: bool(X[0] > 0),
    "int": lambda: int(X[0]),
    "index": lambda: [1, 2][X[1].long()],
    "tolist": X.tolist,
    "numpy": X.numpy,
    "cpu": X.cpu,
    "nonzero": X.nonzero,
    "where": lambda: torch.where(X > 1),
    "masked_select": lambda: X.masked_select(X > 1),
    "boolean index": lambda: X[X > 1],
    "boolean assignment": lambda: X.clone().__setitem__(X > 9, 0),
    "unique": X.unique,
    "equal": lambda: torch.equal(X, X),
    "repeats without a size": lambda: X.repeat_interleave(REPEATS),
}

GO_ON: dict[str, Callable[[], object]] = {
    "sum": X.sum,
    "index": lambda: X[REPEATS],
    "where": lambda: torch.where(X > 1, X, 0),
    "masked_fill": lambda: X.masked_fill(X > 1, 0),
    "static": lambda: torch.nonzero_static(X > 1, size=2),
    "repeats with a size": lambda: X.repeat_interleave(REPEATS, output_size=4),
    "gather": lambda: X.gather(0, REPEATS),
}


@pytest.mark.parametrize("name", WAIT)
def test_what_waits_is_seen(name: str) -> None:
    with Operators() as seen:
        WAIT[name]()
    assert seen.waits


@pytest.mark.parametrize("name", GO_ON)
def test_what_does_not_wait_is_left_alone(name: str) -> None:
    with Operators() as seen:
        GO_ON[name]()
    assert not seen.waits
    assert seen.names


def test_the_largest_tensor_is_remembered() -> None:
    with Operators() as seen:
        (X[:, None] * X).sum()
    assert seen.largest == 16
