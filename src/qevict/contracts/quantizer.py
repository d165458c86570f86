"""The quantizer: how a tier encodes."""

from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import ClassVar, Final

import attrs
from jaxtyping import Float
from torch import Tensor

from qevict.contracts.paired import PairedCodes
from qevict.contracts.values import Codes, Geometry, Layout, layout_bytes

NOTHING_SHARED: Final[Codes] = MappingProxyType({})
"""What the windows of a quantizer have in common whose statistics are those of each window."""


@attrs.frozen
class Origin:
    """Where in the model numbers come from, for what was calibrated beforehand.

    Attributes:
        layer: index among the layers that the policy rules.
        heads: KV heads of that layer, in order.
    """

    layer: int
    heads: tuple[int, ...]


class Quantizer(ABC):
    """Encodes whole windows of keys, or of values. A frozen value.

    Keys arrive in the pre-RoPE domain. One instance serves keys and another values, so that axes and bits are chosen
    apart.

    Statistics belong to a window, and are then among its arrays (:meth:`layout`); or to a *sequence*: all windows of
    one KV head of a row have them in common (:meth:`shared_layout`). What is shared is fitted to the windows that a
    tier encodes first and stays as it is while the tier holds any code of that sequence. It is stored and billed once.

    Laws:
        * ``decode`` is a function of the codes alone, bit-identical each time.
        * ``|decode(encode(x)) - x|`` is at most half a step of the stored grid. Parameters are rounded outwards: a grid
          may be wider than the data, never shifted off it, unless its parameters are codes themselves: then by at most
          one step of theirs. Where it is shared, this holds of the windows that it was fitted to; what lies beyond it
          later is given its nearest end.
        * A window that is constant, and representable in the parameters' dtype, comes back exactly, unless
          :attr:`keeps_constants` is False.
        * The arrays of a code are those of :meth:`layout`, and what :meth:`fit` gives are those of
          :meth:`shared_layout`, so bytes are exact before anything is encoded. No name is in both.
        * What a KV head's windows share depends on that head alone.
        * Codes that claim to be ``paired`` are: read as that layout says, they give what ``decode`` gives.
        * ``layout`` has room for a code of ``bits`` bits for every number of a window.
        * Windows and heads are encoded apart: given what they share, encoding them together or one by one gives the
          same codes.
        * No host synchronisation: steps between events decode.

    Attributes:
        name: the name in files and on the command line.
        min_snr_db: signal-to-noise ratio that standard normal input is promised.
        idempotent: encoding a decoded window again gives the same codes.
    """

    name: ClassVar[str]
    idempotent: ClassVar[bool] = False

    @property
    def keeps_constants(self) -> bool:
        """Constant windows come back exactly.

        False for what turns, centres or scales numbers before they are put on a grid, for grids that are shared, and
        for codebooks.
        """
        return True

    @property
    def paired(self) -> PairedCodes | None:
        """The named layout of the arrays, if it is that one; None for any other.

        Backends may read such codes without :meth:`decode`.
        """
        return None

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of one code."""

    @property
    @abstractmethod
    def min_snr_db(self) -> float:
        """Promised signal-to-noise ratio on standard normal input, in dB."""

    @abstractmethod
    def layout(self, window_tokens: int, head_dim: int) -> Layout:
        """The arrays that one window of one head takes.

        Raises:
            PolicyError: windows of that shape cannot be encoded; the message names the allowed values.
        """

    def check(self, geometry: Geometry) -> None:  # noqa: B027 - most quantizers serve every model
        """Refuse a model that cannot be served, beyond what :meth:`layout` says; for what was calibrated for another.

        Raises:
            PolicyError: with the remedy.
        """

    def shared_layout(self, head_dim: int) -> Layout:
        """The arrays that all windows of one KV head of a row have in common; none unless a quantizer says otherwise.

        Raises:
            PolicyError: heads of that many channels cannot be encoded; the message names the allowed values.
        """
        return {}

    def fit(self, x: Float[Tensor, "heads windows window head_dim"], origin: Origin) -> Codes:
        """What the windows of one row are to have in common: the arrays of :meth:`shared_layout` for each head.

        Computes in fp32, without a host synchronisation. What was calibrated beforehand looks at ``origin`` alone.

        Args:
            x: the windows of the row that are to be encoded; at least one.
            origin: where they come from.

        Returns:
            Arrays with a leading axis ``heads``.
        """
        return NOTHING_SHARED

    @abstractmethod
    def encode(self, x: Float[Tensor, "heads windows window head_dim"], shared: Codes = NOTHING_SHARED) -> Codes:
        """Encode windows; computes in fp32.

        Args:
            x: the windows.
            shared: what :meth:`fit` gave, for each window: arrays with leading axes ``[heads, windows]``.
        """

    @abstractmethod
    def decode(self, codes: Codes, head_dim: int) -> Float[Tensor, "heads windows window head_dim"]:
        """Rebuild windows in fp32; what they share is among the codes, for each window."""


def for_windows(shared: Codes, windows: int) -> Codes:
    """What one row's windows share, for each of them, without a copy: ``[heads, windows, ...]``."""
    return {name: array.unsqueeze(1).expand(-1, windows, *array.shape[1:]) for name, array in shared.items()}


def shared_bytes(keys: Quantizer, values: Quantizer, head_dim: int, kv_heads: int) -> int:
    """Exact bytes of what all windows of a row have in common, over all KV heads."""
    per_head = layout_bytes(keys.shared_layout(head_dim)) + layout_bytes(values.shared_layout(head_dim))
    return kv_heads * per_head


def window_bytes(keys: Quantizer, values: Quantizer, window_tokens: int, head_dim: int, kv_heads: int) -> int:
    """Exact bytes of one window of all KV heads: codes, scales and zero points of keys and values."""
    per_head = layout_bytes(keys.layout(window_tokens, head_dim)) + layout_bytes(values.layout(window_tokens, head_dim))
    return kv_heads * per_head
