"""What a crop asks for, and what it means for layers that no policy owns."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from qevict.errors import InputError, UnsupportedOperationError


def check_removal(tokens_to_remove: object, seen: int) -> int:
    """How many of the tokens seen a crop takes back.

    Raises:
        InputError: this is no whole number, it is above 0, or no token would be left.
    """
    given = tokens_to_remove
    if isinstance(given, Tensor) and given.ndim == 0 and not given.is_floating_point():
        given = given.item()
    if not isinstance(given, int) or isinstance(given, bool):
        msg = f"crop takes a whole number, as an int or a tensor without axes; got {tokens_to_remove!r}"
        raise InputError(msg)
    if given > 0:
        msg = f"crop takes 0, or minus the number of tokens to remove from the end; got {given}, a length to keep"
        raise InputError(f"{msg}: give tokens to remove instead")
    if given and -given >= seen:
        msg = f"{-given} tokens cannot be taken back from a cache that has seen {seen}: at least 1 must stay"
        raise InputError(f"{msg}; reset it to empty it")
    return -given


def crop_layers(layers: Sequence[Any], count: int) -> Iterator[Any]:
    """Layers of the library without their last tokens; those that are given stay as they are.

    Raises:
        UnsupportedOperationError: a layer has already dropped tokens that it would need again.
    """
    copies = [copy.copy(layer) for layer in layers]
    for layer in copies:
        try:
            layer.crop(-count)
        except RuntimeError as error:
            msg = f"crop cannot be exact: a {type(layer).__name__} of this model has dropped tokens that must come back"
            raise UnsupportedOperationError(f"{msg}; fork the cache before tokens that you may take back") from error
    return iter(copies)
