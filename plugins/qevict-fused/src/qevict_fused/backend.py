"""The fused backend: one token of every lane in one operator, anything else as the flash backend does it."""

import warnings
from typing import ClassVar, Literal

import attrs
import torch

from qevict.backends.flash import FlashAttention
from qevict.contracts.backend import Attended, AttentionBackend, Query, Setting, View
from qevict.contracts.values import ATTENDED, Need
from qevict.errors import PolicyError
from qevict.shapes import Mass, MassByQuery
from qevict_fused.layouts import CHANNELS, Told, reading, told
from qevict_fused.native import instruction_set, missing

_REST = FlashAttention()

_STORED = frozenset({torch.float32, torch.float16, torch.bfloat16})


def _known_instructions(_instance: object, _attribute: object, value: str | None) -> None:
    if value not in {None, "avx2", "portable"}:
        raise PolicyError(f"instructions={value!r} are unknown; allowed: 'avx2', 'portable', or None for the best here")


@attrs.frozen
class FusedAttention(AttentionBackend):
    """Attends one token of every lane over full precision and codes, where both lie, in one C++ operator.

    Codes become numbers eight tokens at a time, in the first-level cache, or are added up as codes; nothing is rebuilt.
    Keys are turned to their place in the window, queries back by where it begins. The query heads that share a KV head
    share what is read. Window masses are sums of weights that are there already. Work is cut into pieces by sizes
    alone, so that answers do not depend on the number of threads.

    It reads every layout of :class:`~qevict.contracts.paired.PairedCodes` with grids per channel for keys and per token
    for values. Forwards of many tokens, other layouts, other devices, and heads whose channels are no multiple of 16
    are attended to by the flash backend; all are, where the operator could not be built, and a warning says so.

    Args:
        instructions: ``"avx2"``, ``"portable"`` for what every processor has, or None for the best there is.

    Source: log-sum-exp merging of splits as in Flash-Decoding (Dao et al., 2023) and FlashInfer (arXiv 2501.01005),
    section 2.2; the low-bit product with per-channel keys as in KIVI (arXiv 2402.02750), section 4.
    """

    name: ClassVar[str] = "fused"
    provides: ClassVar[frozenset[Need]] = ATTENDED
    instructions: Literal["avx2", "portable"] | None = attrs.field(
        default=None, validator=_known_instructions, kw_only=True
    )

    def reason(self, setting: Setting) -> str | None:
        """On what the operator runs; None where it does not serve decoding."""
        if missing() is not None or setting.device.type != "cpu" or setting.dtype not in _STORED:
            return None
        if setting.head_dim % CHANNELS:
            return None
        if not all(reading(*codec) is not None for codec in setting.codecs):
            return None
        if self.instructions == "avx2" and instruction_set() != "avx2":
            return None
        codes = ", codes read in place" if setting.codecs else ""
        return f"on cpu through qevict_fused::attend ({self.instructions or instruction_set()}){codes}"

    def attend(self, query: Query, view: View, *, want_mass: bool) -> Attended:
        """One operator for one token."""
        codes = _for_operator(query, view)
        if codes is None:
            return _REST.attend(query, view, want_mass=want_mass)
        return _attend(query, view, codes, self.instructions or "", want_mass=want_mass)

    def mass(self, query: Query, view: View) -> Mass:
        """Masses of one token come with its attention."""
        codes = _for_operator(query, view)
        if codes is None:
            return _REST.mass(query, view)
        mass = _attend(query, view, codes, self.instructions or "", want_mass=True).mass
        assert mass is not None
        return mass

    def mass_by_query(self, query: Query, view: View) -> MassByQuery:
        """As the flash backend: once in a prompt."""
        return _REST.mass_by_query(query, view)


def _for_operator(query: Query, view: View) -> Told | None:
    """What is told of the codes, where the operator serves: one token, on a processor, over what it reads."""
    vectors = query.vectors
    if vectors.shape[3] != 1 or vectors.device.type != "cpu" or vectors.shape[4] % CHANNELS:
        return None
    if missing() is not None:
        warnings.warn(f"qevict-fused attends as the flash backend does: {missing()}", stacklevel=3)
        return None
    stored = vectors.dtype in _STORED and view.keys.dtype in _STORED
    return told(view) if stored else None


def _attend(query: Query, view: View, codes: Told, instructions: str, *, want_mass: bool) -> Attended:
    rotary = view.rotary
    arrays, formats = codes
    output, lse, masses = torch.ops.qevict_fused.attend.default(
        query.vectors,
        query.positions,
        query.scaling,
        query.softcap or 0.0,
        query.sink_logits,
        view.sink_keys,
        view.sink_values,
        view.keys,
        view.values,
        view.slots,
        view.windows,
        view.present,
        view.lengths,
        None if rotary is None else rotary.inverse_frequencies,
        1.0 if rotary is None else rotary.amplitude,
        view.rotary_offset,
        arrays,
        formats,
        want_mass,
        instructions,
    )
    if not want_mass:
        return Attended(output, lse)
    return Attended(output, lse, mass=masses.narrow(2, 1, masses.shape[2] - 1), protected_mass=masses.select(2, 0))
