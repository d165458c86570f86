"""KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction (arXiv 2505.23416)."""

from typing import ClassVar

import attrs
import torch

from qevict.contracts.budget import Budget
from qevict.contracts.scorer import IMPORTANCE, Repeats, Scorer, State
from qevict.contracts.values import Need, Observation, Windows
from qevict.errors import PolicyError
from qevict.policy import Policy
from qevict.routers.greedy import GreedyTiers
from qevict.shapes import Scores
from qevict_baselines.composing import evicting


def _repeats(_instance: object, _attribute: object, value: object) -> None:
    if not isinstance(value, Repeats):
        msg = f"repeats says how the prompt is repeated, Repeats(tokens=2048, ...); got {value!r}"
        raise PolicyError(msg)


@attrs.frozen
class Reconstruction(Scorer):
    """The highest attention that a window gets while the model repeats the text.

    KVzip (Kim et al., arXiv 2505.23416): with the whole context cached, the model reads it once more, piece
    by piece; what no query of the repetition attends to is not needed to rebuild the text. The score is the maximum
    over the repetition's queries and the query heads that share a key, of a softmax over the repeated piece and the
    repetition's own tokens.

    Faithful: windows of one token, lanes of one KV head, pieces of 2048 tokens, each behind the end of the one before.
    Differs: no instruction to repeat stands before a piece unless its token ids are given, since a policy knows no
    tokenizer. A longer window counts by its highest token, a lane of several KV heads by the mean over heads. What is
    decoded later scores 0.

    The prompt must be read by ``session.prefill``; it costs two to three times as much as without.

    Args:
        repeats: how the prompt is repeated.

    Bytes: 4 per window and lane.
    """

    name: ClassVar[str] = "reconstruction"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RECONSTRUCTION})
    repeats: Repeats = attrs.field(factory=Repeats, validator=_repeats)

    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """Nothing repeated."""
        return {"highest": torch.zeros(lanes, windows, dtype=torch.float32, device=device)}

    def update(self, state: State, observation: Observation) -> State:
        """Keep the highest."""
        assert observation.reconstruction is not None
        highest = observation.reconstruction.amax(dim=2).mean(dim=1)
        return {"highest": torch.maximum(state["highest"], highest)}

    def rank(self, state: State, windows: Windows) -> dict[str, Scores]:
        """The highest attention so far."""
        return {IMPORTANCE: state["highest"]}


def kvzip(
    budget: Budget | str,
    *,
    instruction: tuple[int, ...] = (),
    sink_tokens: int = 4,
    repeat_tokens: int = 2048,
    layerwise: bool = False,
    dtype: torch.dtype | None = None,
) -> Policy:
    """What the model needs to repeat the text; all heads of all layers compete.

    KVzip (Kim et al., arXiv 2505.23416): see :class:`Reconstruction`. Compressed once, at the prompt's end, which
    ``session.prefill`` reads.

    Bytes: full precision for each kept token, and 16 of bookkeeping per token and KV head, ragged over heads and
    layers.

    Args:
        budget: bytes per row, over all layers.
        instruction: token ids that ask for the repetition, before each piece; none by default.
        sink_tokens: first tokens, which are kept; 4 as in kvpress.
        repeat_tokens: tokens of a piece; 2048 as in kvpress.
        layerwise: only the heads of a layer compete.
        dtype: dtype in which full precision is stored; None for the model's.
    """
    scorer = Reconstruction(Repeats(repeat_tokens, tuple(instruction)))
    router = GreedyTiers(scope="layer" if layerwise else "model")
    return evicting(budget, scorer, router, sink_tokens=sink_tokens, route_at="prompt", dtype=dtype)
