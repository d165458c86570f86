"""What comes into a cache with one forward of the model."""

from collections.abc import Callable

import attrs
from torch import Tensor

from qevict.contracts.output import OutputProjection
from qevict.contracts.values import Geometry
from qevict.engine.clock import Arrival
from qevict.engine.landing import Landing
from qevict.engine.looks import Look
from qevict.errors import UnsupportedModelError

Native = Callable[[Tensor, Tensor], Tensor]
"""The model's own attention over ``[rows, kv_heads, tokens, head_dim]`` keys and values, masks and all."""


@attrs.frozen(eq=False)
class Incoming:
    """What one layer's attention is given in one forward.

    Attributes:
        query: ``[rows, q_heads, tokens, head_dim]``, rotated.
        keys: ``[rows, kv_heads, tokens, head_dim]``, rotated.
        values: likewise.
        scaling: factor on the dot products.
        native: the model's own attention.
        valid: ``[rows, tokens]``, False for pads; None if there are none.
        visible: ``[rows]`` how many keys, old and new, the mask lets the last query see; None without a mask.
        position_ids: rotary positions as the model received them.
        softcap: what the model caps its logits at; None where it does not.
        sink_logits: ``[q_heads]`` the model's sink logits; None where it has none.
        output: reads the layer's output projection; None where nobody asks.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    native: Native
    valid: Tensor | None
    visible: Tensor | None
    position_ids: Tensor
    softcap: float | None = None
    sink_logits: Tensor | None = None
    output: Callable[[], OutputProjection] | None = None


@attrs.frozen(eq=False)
class Seen:
    """What one layer was given in one forward, and what its attention found.

    Attributes:
        incoming: what it was given.
        mass: by window, if it was wanted.
    """

    incoming: Incoming
    mass: Tensor | None


@attrs.frozen(eq=False)
class Forward:
    """What all layers share of one forward.

    Attributes:
        arrival: its tokens, in time.
        landing: where they fall.
        look: which of its queries the scorer is told of.
        places: by layer, where in the dense pool they are written, see :meth:`Stack.admit`; None where every layer
            makes room for them first, and is scored at once.
        seen: of the layers so far, what waits to be shown to the scorer.
    """

    arrival: Arrival
    landing: Landing
    look: Look
    places: tuple[Tensor, ...] | None = None
    seen: list[Seen] = attrs.field(factory=list)


def check_sizes(geometry: Geometry, incoming: Incoming) -> None:
    """Hold the tensors to what the model's configuration says, before the first is stored.

    Raises:
        UnsupportedModelError: they have other heads or channels.
    """
    said = (geometry.q_heads, geometry.kv_heads, geometry.head_dim, geometry.head_dim)
    query, keys, values = incoming.query, incoming.keys, incoming.values
    found = (query.shape[1], keys.shape[1], keys.shape[3], values.shape[3])
    if said != found:
        msg = (
            f"the model's configuration gives {said} as query heads, KV heads, and channels of keys and of values, its "
            f"attention works on {found}; such a model (split over processes, or with keys and values of different "
            f"widths) is not supported"
        )
        raise UnsupportedModelError(msg)
