"""What a scorer is shown: some forwards of one layer, and the windows that it ranks after them."""

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from qevict.contracts.output import OutputProjection
from qevict.contracts.rotary import Rotary
from qevict.contracts.scorer import Scorer
from qevict.contracts.values import Held, Need, Observation, Windows
from qevict.testing.values import normal, uniform

SINKS, WINDOW, HEAD_DIM, GROUP, HIDDEN = 2, 4, 8, 2, 6
FREQUENCIES = 100.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))


@attrs.frozen
class ScorerCase:
    """Some forwards over windows that are all there from the beginning, in lanes of their own.

    Attributes:
        rows: rows of the batch.
        lanes_per_row: lanes of each row.
        heads: KV heads of one lane; twice as many query heads.
        windows: windows of every lane.
        pieces: forwards in which the prompt is read.
        later: forwards after it.
        tokens: new tokens of each forward.
        dtype: dtype of the model.
        seed: decides the numbers.
    """

    rows: int
    lanes_per_row: int
    heads: int
    windows: int
    pieces: int
    later: int
    tokens: int
    dtype: torch.dtype
    seed: int

    @property
    def lanes(self) -> int:
        """Lanes of the layer."""
        return self.rows * self.lanes_per_row

    def windows_now(self) -> Windows:
        """The windows, each lane with gaps of its own, in ascending position; the last has not aged, if it may."""
        present, lengths = torch.ones(self.lanes, self.windows, dtype=torch.bool), self._lengths(self.later)
        positions = self._positions()
        aged = positions + WINDOW <= lengths[:, None] - self.tokens * (self.windows > 1)
        aged[:, 0] = True
        places, counts = aged.long() - 1, tuple(aged.sum(1).tolist())
        return Windows(positions, present, aged, places, counts, lengths=lengths, lanes_per_row=self.lanes_per_row)

    def observations(self, scorer: Scorer, *, nothing: float = 0.0) -> list[Observation]:
        """What the forwards show; nothing but what a scorer needs.

        With ``observe_tokens``, a scorer that needs more than masses sees forwards without masses between the others.

        Args:
            scorer: who is shown.
            nothing: the number that stands where tokens and queries mean nothing.
        """
        prompt = self._prompt(scorer, nothing)
        prompt += self._repeated() if Need.RECONSTRUCTION in scorer.needs else []
        later = [self._later(scorer, 1 + number, nothing) for number in range(self.later)]
        return [each for each in (*prompt, *later) if each.shows_something or not scorer.needs]

    def _prompt(self, scorer: Scorer, nothing: float) -> list[Observation]:
        """The pieces of the prompt, which share its queries; the last shows what concerns single ones."""
        needs, asked = scorer.needs, self._asked(scorer)
        by_query = self._attention(self.seed + 1, asked)
        masses = [share.sum(dim=2) if Need.MASS in needs else None for share in by_query.tensor_split(self.pieces, 2)]
        tokens = [self._tokens(needs, number) for number in range(self.pieces)]
        stride = float(scorer.prompt_stride)
        pieces = [attrs.evolve(own, mass=mass, stands_for=stride) for own, mass in zip(tokens, masses, strict=True)]
        single = not needs.isdisjoint({Need.MASS_BY_QUERY, Need.QUERIES})
        by_query = by_query.masked_fill((asked < 0)[:, None, :, None], nothing)
        pieces[-1] = attrs.evolve(
            pieces[-1],
            ends_prompt=True,
            mass_by_query=by_query if Need.MASS_BY_QUERY in needs else None,
            queries=self._queries(asked, nothing) if Need.QUERIES in needs else None,
            asked=asked if single else None,
            held=None if needs.isdisjoint({Need.HELD, Need.PROMPT}) else self._held(0, nothing),
        )
        return pieces

    def _repeated(self) -> list[Observation]:
        """Pieces of a repetition of the prompt, each of which looks for some of the windows."""
        shape = (self.lanes, self.heads, GROUP, self.windows)
        mine = torch.arange(self.windows) % self.pieces
        nothing = self._tokens(frozenset(), self.pieces)
        highest = [uniform(self.seed + 11 + piece, *shape) * (mine == piece) for piece in range(self.pieces)]
        return [attrs.evolve(nothing, reconstruction=each) for each in highest]

    def _later(self, scorer: Scorer, number: int, nothing: float) -> Observation:
        """A forward after the prompt, which may end in an event.

        Each second looks at nothing if the scorer looks at some tokens only.
        """
        needs, seed = scorer.needs, self.seed + 7 * number
        event = Need.HELD in needs and seed % 2
        seen = attrs.evolve(self._tokens(needs, -number), held=self._held(number, nothing) if event else None)
        if scorer.observe_tokens is not None and number % 2:
            return seen
        mass = self._attention(seed, self._lengths(number)[:, None] - 1 - torch.arange(self.tokens)).sum(dim=2)
        first = (uniform(seed + 1, self.rows) < 0.5).repeat_interleave(self.lanes_per_row)
        return attrs.evolve(
            seen,
            mass=mass if Need.MASS in needs else None,
            stands_for=1.0 if scorer.observe_tokens is None else 2.0,
            first=first if Need.FIRST_LOOKS in needs else None,
        )

    def _tokens(self, needs: frozenset[Need], number: int) -> Observation:
        """New tokens alone, and what a scorer may know without looking at any query."""
        vectors, seed = (self.lanes, self.heads, self.tokens, HEAD_DIM), 5000 + self.seed + 7 * number
        drawn = uniform(seed, self.lanes, self.tokens) * (self.windows + 1)
        return Observation(
            columns=drawn.long().clamp(max=self.windows) - 1,
            windows=self.windows,
            keys=normal(seed + 1, *vectors).to(self.dtype) if Need.KEYS in needs else None,
            values=normal(seed + 2, *vectors).to(self.dtype) if Need.VALUES in needs else None,
            positions=self._positions() if Need.POSITIONS in needs else None,
            rotary=Rotary(FREQUENCIES, amplitude=1.1) if Need.ROTARY in needs else None,
            output=self._output() if Need.OUTPUT_PROJECTION in needs else None,
            lanes_per_row=self.lanes_per_row,
        )

    def _queries(self, asked: Tensor, nothing: float) -> Tensor:
        vectors = normal(self.seed + 2, self.lanes, self.heads, GROUP, asked.shape[1], HEAD_DIM).to(self.dtype)
        return vectors.masked_fill((asked < 0)[:, None, None, :, None], nothing)

    def _positions(self) -> Tensor:
        """First position of each window, each lane with gaps of its own."""
        steps = 1 + (3 * uniform(self.seed, self.lanes, self.windows)).long()
        return SINKS + WINDOW * (steps.cumsum(1) - 1)

    def _lengths(self, later: int) -> Tensor:
        """True tokens of each lane after some forwards behind the prompt: as many in all lanes of a row."""
        ends = self._positions()[:, -1].view(self.rows, self.lanes_per_row).amax(1) + WINDOW - self.seed % WINDOW
        return (ends + later * self.tokens).repeat_interleave(self.lanes_per_row)

    def _asked(self, scorer: Scorer) -> Tensor:
        """Positions of the prompt's queries that a scorer asks for; -1 in rows that are too short for all of them."""
        lengths, longest = self._lengths(0)[:, None], int(self._lengths(0).max())
        back = torch.arange(0, min(scorer.prompt_queries or longest, longest), scorer.prompt_stride)
        return (lengths - 1 - back.flip(0)).clamp(min=-1)

    def _attention(self, seed: int, asked: Tensor) -> Tensor:
        """Masses by query and window, below 1 in sum; none of queries that are not asked, and none in the future."""
        shape = (self.lanes, self.heads * GROUP, asked.shape[1], self.windows)
        seen = self._positions()[:, None, None] <= asked[:, None, :, None]
        return uniform(seed, *shape) / self.windows * seen

    def _held(self, later: int, nothing: float) -> Held:
        """Sinks, windows and one filler; what lies beyond the row's end is not written."""
        start, step = self._positions()[..., None], torch.arange(WINDOW)
        of_sinks, of_filler = torch.arange(SINKS).expand(self.lanes, -1), torch.full((self.lanes, 1), 10**6)
        positions = torch.cat((of_sinks, (start + step).flatten(1), of_filler), dim=1)
        owners = torch.arange(self.windows).repeat_interleave(WINDOW)
        columns = torch.cat((torch.full((SINKS,), -1), owners, torch.tensor([-1])))
        unwritten = positions >= self._lengths(later)[:, None]
        vectors = (self.lanes, self.heads, positions.shape[1], HEAD_DIM)
        return Held(
            normal(self.seed + 8, *vectors).to(self.dtype).masked_fill(unwritten[:, None, :, None], nothing),
            normal(self.seed + 9, *vectors).to(self.dtype).masked_fill(unwritten[:, None, :, None], nothing),
            positions.masked_fill(unwritten, -1),
            (positions + self._turned()).masked_fill(unwritten, -1),
            columns.expand(self.lanes, -1).masked_fill(unwritten, -1),
        )

    def _turned(self) -> Tensor:
        """Rotary minus true position, by lane; 11 in each second row."""
        return (11 * (torch.arange(self.rows) % 2)).repeat_interleave(self.lanes_per_row)[:, None]

    def _output(self) -> OutputProjection:
        heads = self.lanes_per_row * self.heads
        return OutputProjection(normal(self.seed + 10, heads * GROUP, HEAD_DIM, HIDDEN).to(self.dtype), heads)


SCORER_CASES = st.builds(
    ScorerCase,
    rows=st.integers(1, 2),
    lanes_per_row=st.integers(1, 2),
    heads=st.integers(1, 2),
    windows=st.integers(1, 5),
    pieces=st.integers(1, 2),
    later=st.integers(0, 2),
    tokens=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
