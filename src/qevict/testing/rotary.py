"""The laws of rotary position embedding."""

from typing import ClassVar

import attrs
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from qevict.contracts.rotary import Rotary
from qevict.testing.contract import Contract, law
from qevict.testing.operators import Operators
from qevict.testing.values import close, copied, gap, normal, require, same_bits, uniform

ROUND_TRIP = 1e-6


@attrs.frozen
class RotaryCase:
    """Keys at some positions.

    Attributes:
        lanes: lanes, each with positions of its own.
        heads: heads of a lane.
        tokens: tokens of a lane.
        furthest: no position lies beyond.
        dtype: dtype of the keys.
        seed: decides the numbers.
    """

    lanes: int
    heads: int
    tokens: int
    furthest: int
    dtype: torch.dtype
    seed: int

    def keys(self, head_dim: int) -> Tensor:
        """``[lanes, heads, tokens, head_dim]``."""
        return normal(self.seed, self.lanes, self.heads, self.tokens, head_dim).to(self.dtype)

    def positions(self) -> Tensor:
        """``[lanes, 1, tokens]``."""
        return (uniform(self.seed + 1, self.lanes, 1, self.tokens) * (self.furthest + 1)).long()


def plainly_rotated(x: Tensor, positions: Tensor, frequencies: Tensor, amplitude: float) -> Tensor:
    """RoPE as models write it: ``x cos + rotate_half(x) sin``, in fp32.

    Args:
        x: ``[..., tokens, head_dim]``.
        positions: broadcast against the leading axes of ``x``.
        frequencies: one per pair of channels.
        amplitude: factor on both tables.
    """
    angles = torch.cat((positions[..., None].float() * frequencies.float(),) * 2, dim=-1)
    first, second = x.float().split(x.shape[-1] // 2, dim=-1)
    return x.float() * (angles.cos() * amplitude) + torch.cat((-second, first), dim=-1) * (angles.sin() * amplitude)


class RotaryContract(Contract[Rotary, RotaryCase]):
    """The laws of :class:`~qevict.contracts.rotary.Rotary`, over the tables of one model.

    Override :meth:`turned_by_model` to compare with a model's own function; as it stands, the published formula is
    worked out on the part's frequencies and amplitude.

    Example:
        ```python
        import torch
        from qevict.contracts.rotary import Rotary
        from qevict.testing import RotaryContract


        class TestYarnLikeTable(RotaryContract):
            part = Rotary(1 / 10_000 ** (torch.arange(8) / 8), amplitude=1.14)
        ```
    """

    kind: ClassVar[type] = Rotary

    def cases(self) -> SearchStrategy[RotaryCase]:
        """A few keys, at positions up to a hundred thousand."""
        return st.builds(
            RotaryCase,
            lanes=st.integers(1, 2),
            heads=st.integers(1, 2),
            tokens=st.integers(1, 6),
            furthest=st.sampled_from([0, 1, 30, 4000, 100_000]),
            dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
            seed=st.integers(0, 1000),
        )

    def twin(self) -> Rotary:
        """An equal table with tensors of its own."""
        return attrs.evolve(self.part, inverse_frequencies=self.part.inverse_frequencies.clone())

    def turned_by_model(self, keys: Tensor, positions: Tensor) -> Tensor:
        """The keys as the model itself rotates them.

        Args:
            keys: fp32, ``[lanes, heads, tokens, head_dim]``.
            positions: ``[lanes, 1, tokens]``.
        """
        return plainly_rotated(keys, positions, self.part.inverse_frequencies, self.part.amplitude)

    @law("rotate equals the model's own function on the same tables (fp32: bit for bit).")
    def test_rotating_is_the_models_own_function(self, case: RotaryCase) -> None:
        keys, positions = self._keys(case).float(), case.positions().to(self.device)
        turned, wanted = self.part.rotate(keys, positions), self.turned_by_model(keys, positions)
        equal = same_bits(turned, wanted) if self.device.type == "cpu" else close(turned, wanted)
        require(equal, f"rotated to {gap(turned, wanted)}")

    @law("unrotate(rotate(x, p), p) equals x within 1e-6 relative in fp32; the inverse divides by cos^2 + sin^2.")
    def test_unrotating_undoes_rotating(self, case: RotaryCase) -> None:
        keys, positions = self._keys(case).float(), case.positions().to(self.device)
        back = self.part.unrotate(self.turned_by_model(keys, positions), positions)
        # Over a whole cache 1e-6 holds; one key of few channels may be unlucky twice.
        error = (back - keys).norm(dim=-1) / keys.norm(dim=-1)
        require(error.max() <= 2 * ROUND_TRIP, f"a key came back with a relative error of {float(error.max()):.3g}")

    @law("Work is done in fp32 whatever the dtype of x; the result is fp32 and the caller rounds once.")
    def test_work_is_done_in_fp32(self, case: RotaryCase) -> None:
        keys, positions = self._keys(case), case.positions().to(self.device)
        for turn in (self.part.rotate, self.part.unrotate):
            turned, wanted = turn(keys, positions), turn(keys.float(), positions)
            require(turned.dtype == torch.float32, f"keys in {case.dtype} came back as {turned.dtype}")
            require(
                same_bits(turned, wanted), f"keys in {case.dtype} turn otherwise than in fp32: {gap(turned, wanted)}"
            )

    @law("A frozen value: keys and positions are left alone, and each key turns by its own position only.")
    def test_keys_turn_one_by_one(self, case: RotaryCase) -> None:
        keys, positions = self._keys(case), case.positions().to(self.device)
        for turn in (self.part.rotate, self.part.unrotate):
            before = copied((keys, positions))
            together = turn(keys, positions)
            require(same_bits(keys, before[0]) and same_bits(positions, before[1]), "it changed its arguments")
            for lane in range(case.lanes):
                alone = turn(keys[lane, :, -1:], positions[lane, :, -1:])
                among = together[lane, :, -1:]
                require(
                    close(alone, among, 1e-6), f"the last key of lane {lane} turns otherwise alone: {gap(alone, among)}"
                )

    @law("No host synchronisation: keys are turned at every step.")
    def test_the_host_never_waits(self, case: RotaryCase) -> None:
        keys, positions = self._keys(case), case.positions().to(self.device)
        with Operators() as operators:
            self.part.unrotate(self.part.rotate(keys, positions), positions)
        require(not operators.waits, f"it waits for the device: {', '.join(sorted(operators.waits))}")

    def _keys(self, case: RotaryCase) -> Tensor:
        return case.keys(self.part.rotary_dim).to(self.device)
