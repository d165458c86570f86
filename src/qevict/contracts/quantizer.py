"""The quantizer: how a tier encodes."""

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from qevict.contracts.paired import PairedCodes
from qevict.contracts.values import Codes, Layout, layout_bytes


class Quantizer(ABC):
    """Encodes whole windows of keys, or of values. A frozen value.

    Keys arrive in the pre-RoPE domain. One instance serves keys and another values, so that axes and bits are chosen
    apart.

    Laws:
        * ``decode`` is a function of the codes alone, bit-identical each time.
        * ``|decode(encode(x)) - x|`` is at most half a step of the stored grid. Parameters are rounded outwards: a grid
          may be wider than the data, never shifted off it.
        * A group that is constant, and representable in the parameters' dtype, comes back exactly.
        * The arrays of a code are those of :meth:`layout`, so bytes are exact before anything is encoded.
        * Codes that claim to be ``paired`` are: read as that layout says, they give what ``decode`` gives.
        * ``layout`` has room for a code of ``bits`` bits for every number of a window.
        * Windows and heads are encoded apart: encoding them together or one by one gives the same codes.
        * No host synchronisation: steps between events decode.

    Attributes:
        name: the name in files and on the command line.
        min_snr_db: signal-to-noise ratio that standard normal input is promised.
        idempotent: encoding a decoded window again gives the same codes.
    """

    name: ClassVar[str]
    idempotent: ClassVar[bool] = False

    @property
    def paired(self) -> PairedCodes | None:
        """The named layout of arrays ``codes``, ``scale`` and ``zero`` with ``x = zero + scale * code``, if it is that.

        Backends may read such codes without :meth:`decode`; None for any other layout.
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

    @abstractmethod
    def encode(self, x: Float[Tensor, "heads windows window head_dim"]) -> Codes:
        """Encode windows; computes in fp32."""

    @abstractmethod
    def decode(self, codes: Codes, head_dim: int) -> Float[Tensor, "heads windows window head_dim"]:
        """Rebuild windows in fp32."""


def window_bytes(keys: Quantizer, values: Quantizer, window_tokens: int, head_dim: int, kv_heads: int) -> int:
    """Exact bytes of one window of all KV heads: codes, scales and zero points of keys and values."""
    per_head = layout_bytes(keys.layout(window_tokens, head_dim)) + layout_bytes(values.layout(window_tokens, head_dim))
    return kv_heads * per_head
