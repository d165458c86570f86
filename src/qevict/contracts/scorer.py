"""The scorer: which windows matter."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from qevict.contracts.values import Need, Observation, Windows
from qevict.errors import PolicyError
from qevict.shapes import Scores

State = Mapping[str, Tensor]
"""A scorer's memory: named fp32 tensors with leading axes ``[lanes, windows]``; the engine moves and bills them."""

IMPORTANCE = "importance"
"""Name of the ranking that routers read when a scorer has only one."""


@attrs.frozen
class Repeats:
    """How a prompt is repeated behind itself, for scorers that need its reconstruction.

    Attributes:
        tokens: of the prompt, in one piece.
        instruction: token ids before each piece, such as those of a request to repeat the text.
        lead_tokens: last tokens of the piece before, given again before each piece but the first.

    Raises:
        PolicyError: a number is too small, or the instruction holds no token ids.
    """

    tokens: int = 2048
    instruction: tuple[int, ...] = ()
    lead_tokens: int = 8

    def __attrs_post_init__(self) -> None:
        for name, least in (("tokens", 1), ("lead_tokens", 0)):
            count = getattr(self, name)
            if type(count) is not int or count < least:
                msg = f"{name} of a repetition is a whole number of at least {least}, got {count!r}"
                raise PolicyError(msg)
        if not all(type(each) is int and each >= 0 for each in self.instruction):
            msg = f"the instruction of a repetition holds token ids, got {self.instruction!r}"
            raise PolicyError(msg)


class Scorer(ABC):
    """Says which windows matter. A scorer is a frozen value; what it remembers is the state that it is handed.

    Laws:
        * Pure: neither the state nor the observation is changed; equal input, equal output.
        * fp32, whatever dtype the model computes in.
        * Rows are strangers: a row's scores depend on that row alone.
        * Lanes are strangers, unless ``lanes_share_row``: a lane's scores depend on that lane alone.
        * Results depend on a window's position and history, never on its column or storage slot.
        * What an observation says to mean nothing (tokens not written, queries not asked for) changes nothing.
        * No host synchronisation (no ``.item()``, ``nonzero`` or boolean indexing).
        * Which queries are looked at is decided row by row, as it would be for that row alone.

    :meth:`update` is called where a forward shows something of what is needed, whatever else is None then; a scorer
    that needs nothing is called only if it has a state. Of a prompt it is called layer by layer, of a single token
    behind it once for all layers, which are strangers as rows are (unless something is needed that one layer alone can
    show: its output projection, or all that it holds). Behind the prompt of a policy with ``route_at="prompt"``
    nothing is ranked any more, and nothing shown.

    Attributes:
        name: the name in files and on the command line.
        needs: what :meth:`update` reads from an observation; nothing else is computed.
        prompt_queries: how many of the prompt's last queries the prompt's masses are summed over; None for all.
        prompt_stride: of these, every n-th is looked at, counted backwards from the last, which always is.
        observe_tokens: after the prompt, masses are of the last n tokens before each routing event only; None for all.
            Of a forward with none of these tokens there are no masses.
        repeats: how the prompt is repeated, with ``Need.RECONSTRUCTION``: ``session.prefill`` does so, at two to three
            times the cost of reading it.
        keeps_suffix: of two windows the later one ranks higher, so that what a row keeps behind its sinks is a suffix.
        lanes_share_row: scores of a row's lanes may depend on one another, as where a head counts by its share of all.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()
    prompt_queries: int | None = None
    prompt_stride: int = 1
    observe_tokens: int | None = None
    repeats: Repeats | None = None
    keeps_suffix: ClassVar[bool] = False
    lanes_share_row: ClassVar[bool] = False

    @abstractmethod
    def start(self, lanes: int, windows: int, device: torch.device) -> State:
        """The state of windows that nothing was observed of yet."""

    @abstractmethod
    def update(self, state: State, observation: Observation) -> State:
        """The state after one more forward."""

    @abstractmethod
    def rank(self, state: State, windows: Windows) -> Mapping[str, Scores]:
        """Rank the windows; absent columns are ignored."""
