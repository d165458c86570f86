"""One last forward over many caches: each is a row, whatever policy rules it."""

import sys
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from qevict.engine.clock import Clock
from qevict.engine.engine import Engine
from qevict.engine.forward import Incoming
from qevict.errors import UnsupportedOperationError
from qevict.hf.cache import Cache
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.hf.layer import Turn, with_owned
from qevict.hf.layers import library_layers, text_config


@torch.no_grad()
def read_last(model: Any, caches: Sequence[Cache], input_ids: Tensor, *, logits: int) -> Tensor:
    """Read the same tokens behind many caches at once, for the last time: each row is what its cache alone would give.

    The caches are spent. What a policy makes of these tokens would show behind them only, and so nothing is scored and
    no event takes place.

    Args:
        model: what a policy is attached to.
        caches: of one row each, which have seen equally many tokens.
        input_ids: ``[1, tokens]``, without pads.
        logits: of how many of the last tokens.

    Returns:
        ``[caches, logits, vocabulary]``.

    Raises:
        UnsupportedOperationError: some cache has more rows, has seen another number of tokens, or has layers of the
            library.
    """
    forms = {(cache.get_seq_length(), len(cache.engine.clock.tokens), bool(cache.library_layers)) for cache in caches}
    if len(forms) != 1 or not next(iter(forms))[0] or next(iter(forms))[1:] != (1, False):
        msg = (
            "caches can be read behind together where all hold one row of the same number of tokens and a policy rules "
            f"every layer; got (tokens, rows, has layers of the library) {sorted(forms)}; read behind each alone"
        )
        raise UnsupportedOperationError(msg)
    config = text_config(model)
    layers = with_owned(library_layers(config), _Rows(tuple(_idle(cache.engine) for cache in caches)), Turn(config))
    ids = input_ids.expand(len(caches), -1)
    cache = TransformersCache(layers=layers)
    found: Tensor = model(ids, use_cache=True, logits_to_keep=logits, **{CACHE_ARGUMENT: cache}).logits
    return found


def _idle(engine: Engine) -> Engine:
    """An engine that neither scores nor routes what comes."""
    engine.wiring = attrs.evolve(engine.wiring, policy=attrs.evolve(engine.wiring.policy, route_at="prompt"))
    engine.clock.period_tokens, engine.clock.min_tokens = sys.maxsize, 0
    return engine


@attrs.frozen(eq=False)
class _Rows:
    """Stands where a cache's engine stands, and hands each row to an engine of its own."""

    engines: tuple[Engine, ...]

    @property
    def clock(self) -> Clock:
        return self.engines[0].clock

    def step(self, index: int, incoming: Incoming) -> Tensor:
        rows = len(self.engines)
        return torch.cat([engine.step(index, _row(incoming, row, rows)) for row, engine in enumerate(self.engines)])


def _row(incoming: Incoming, row: int, rows: int) -> Incoming:
    def native(keys: Tensor, values: Tensor) -> Tensor:
        """The model's own attention serves all rows or none: every row is given this one's keys."""
        return incoming.native(*(part.expand(rows, -1, -1, -1) for part in (keys, values)))[row : row + 1]

    own = slice(row, row + 1)
    return attrs.evolve(
        incoming,
        query=incoming.query[own],
        keys=incoming.keys[own],
        values=incoming.values[own],
        valid=None if incoming.valid is None else incoming.valid[own],
        visible=None if incoming.visible is None else incoming.visible[own],
        position_ids=incoming.position_ids[own] if incoming.position_ids.shape[0] == rows else incoming.position_ids,
        native=native,
    )
