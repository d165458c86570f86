"""KVQuant's quantizers: worked values, sparse outliers, files, and models that a calibration is not for."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import qevict
from qevict.contracts.quantizer import Origin, Quantizer, for_windows
from qevict.errors import PolicyError
from qevict.quantizers.packing import unpack
from qevict.testing import QuantizerContract
from qevict_baselines.kvquant import CalibratedKeys, CalibratedValues, FittedKeys, FittedValues, kvquant, nuq
from qevict_baselines.kvquant_calibration import Calibration
from tests.baselines import worked_quantised as worked
from tests.oracle import tiny

LAYERS, HEADS, HEAD_DIM = 2, 4, 16


def calibration(bits: int = 2, layers: int = LAYERS, heads: int = HEADS, head_dim: int = HEAD_DIM) -> Calibration:
    """Each layer and head with ranges of its own."""
    width = 1 + torch.rand(layers, heads, head_dim, generator=torch.Generator().manual_seed(bits))
    levels = torch.linspace(-0.9, 1, 2**bits).expand(layers, -1) * torch.tensor([1.0, 0.7])[:layers, None]
    return Calibration(-width, 1.5 * width, levels.contiguous(), levels.flip(0).contiguous(), bits)


FOLDER = tempfile.TemporaryDirectory()
PATH = str(Path(FOLDER.name) / "two_bits.safetensors")
calibration().save(PATH)


def back(quantizer: Quantizer, x: Tensor, layer: int = 0, heads: Sequence[int] | None = None) -> tuple[Any, Tensor]:
    """Codes of windows that are all of one row, and what they are decoded to."""
    origin = Origin(layer, tuple(heads or range(x.shape[0])))
    shared = for_windows(quantizer.fit(x, origin), x.shape[1])
    codes = {**quantizer.encode(x, shared), **shared}
    return codes, quantizer.decode(codes, x.shape[3])


def test_keys_are_those_of_the_worked_example(tmp_path: Path) -> None:
    """Algorithms notes, section 9: two channels of four tokens, ranges and levels given, one outlier in each."""
    low, high = (torch.tensor([[[own[1][end] for own in worked.KVQUANT_KEYS]]]) for end in (0, 1))
    levels = torch.tensor([worked.KVQUANT_LEVELS])
    file = tmp_path / "worked.safetensors"
    Calibration(low, high, levels, levels, 2).save(file)
    x = torch.tensor([own[0] for own in worked.KVQUANT_KEYS]).T[None, None]
    codes, decoded = back(CalibratedKeys(str(file), outliers=0.25), x)
    for channel, (_, _, outliers, expected, restored) in enumerate(worked.KVQUANT_KEYS):
        torch.testing.assert_close(decoded[0, 0, :, channel], torch.tensor(restored), atol=2e-3, rtol=0)
        own = unpack(codes["codes"], 2).view(4, 2)[:, channel].tolist()
        assert [code for code, out in zip(own, outliers, strict=True) if not out] == [
            code for code, out in zip(expected, outliers, strict=True) if not out
        ]


def test_values_are_those_of_the_worked_example(tmp_path: Path) -> None:
    file = tmp_path / "worked.safetensors"
    levels = torch.tensor([worked.KVQUANT_LEVELS])
    Calibration(torch.zeros(1, 1, 8) - 1, torch.ones(1, 1, 8), levels, levels, 2).save(file)
    x = torch.tensor(worked.KVQUANT_VALUE).view(1, 1, 1, 8)
    codes, decoded = back(CalibratedValues(str(file), outliers=0.25), x)
    torch.testing.assert_close(decoded.flatten(), torch.tensor(worked.KVQUANT_VALUE_RESTORED), atol=2e-3, rtol=0)
    kept = sorted(codes["places"].flatten().tolist())
    assert kept == [place for place, out in enumerate(worked.KVQUANT_VALUE_OUTLIERS) if out]
    assert (float(codes["low"]), float(codes["high"])) == pytest.approx(worked.KVQUANT_VALUE_RANGE, abs=1e-3)


def test_each_layer_and_head_reads_its_own_calibration() -> None:
    keys, x = CalibratedKeys(PATH), torch.zeros(2, 1, 8, HEAD_DIM)
    made = calibration()
    for layer, heads in ((0, (0, 1)), (1, (2, 3))):
        shared = keys.fit(x, Origin(layer, heads))
        torch.testing.assert_close(shared["low"].float(), made.key_low[layer, list(heads)], atol=2e-3, rtol=0)
        torch.testing.assert_close(shared["levels"][0].float(), made.key_levels[layer], atol=1e-3, rtol=0)


@pytest.mark.parametrize("make", [FittedKeys, FittedValues])
def test_outliers_come_back_at_16_bits_and_leave_the_others_their_range(make: Any) -> None:
    x = torch.randn(1, 40, 8, 64, generator=torch.Generator().manual_seed(0))
    x[:, 4, 3, 7] = 300.0
    x[:, 11, 5, 9] = -77.5
    with_room, without = (back(make(bits=3, outliers=part), x)[1] for part in (0.01, 0.0))
    assert with_room[0, 4, 3, 7] == 300
    assert with_room[0, 11, 5, 9] == -77.5
    rest = x.abs() < 10
    error, other = ((each - x)[rest].square().mean() for each in (with_room, without))
    assert error < 0.06
    assert error < other


def test_what_is_told_of_bytes_is_what_is_stored() -> None:
    policy = nuq(bits=3, dtype=torch.bfloat16)
    model = tiny("llama", num_hidden_layers=2, head_dim=64)
    with qevict.attach(model, policy) as session:
        cache = session.prefill(torch.randint(3, 97, (1, 209)))
    coded = 200
    report = cache.report()
    per_token = (report.bytes_by_tier["nuq3"]) / (coded * 2 * 2)
    assert per_token == 58
    assert cache.wiring.shared_bytes == 2 * 256


def test_another_model_is_refused_when_attached() -> None:
    model = tiny("llama", num_hidden_layers=3)
    with pytest.raises(PolicyError, match=r"calibration is for .* \(2, 4, 16\)"), qevict.attach(model, kvquant(PATH)):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FittedKeys(8), "bits=8"),
        (lambda: FittedValues(outliers=1.0), "from 0 to below 0.5"),
        (lambda: CalibratedKeys("nowhere.safetensors"), r"cannot read the calibration 'nowhere.safetensors'"),
        (lambda: FittedKeys(3).layout(1, 2), "do not fill bytes"),
        (lambda: FittedKeys(4).layout(1024, 64), "places of outliers have 16 bits"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make()


def test_equal_calibrations_are_equal_policies(tmp_path: Path) -> None:
    twin, other = tmp_path / "twin.safetensors", tmp_path / "other.safetensors"
    calibration().save(twin)
    calibration(3).save(other)
    assert CalibratedKeys(PATH).calibration == CalibratedKeys(str(twin)).calibration
    assert kvquant(PATH) == kvquant(PATH)
    assert hash(kvquant(PATH)) == hash(kvquant(PATH))
    assert CalibratedKeys(PATH).calibration != CalibratedKeys(str(other)).calibration


class _Kit(QuantizerContract):
    """The kit; numbers that find no room beside the codes are put to the end of a range, wherever that is."""

    examples: ClassVar[int] = 8
    shapes: ClassVar[Any] = ((8, HEAD_DIM), (4, HEAD_DIM), (16, HEAD_DIM))

    def error_bound(self, x: Tensor) -> Tensor:
        fitted = x.amax((1, 2, 3), keepdim=True) - x.amin((1, 2, 3), keepdim=True)
        return (
            torch.full_like(x, torch.inf) if isinstance(self.part, CalibratedKeys) else fitted * 1.01 + 1e-3 * x.abs()
        )


class TestFittedKeys(_Kit):
    part = FittedKeys()


class TestFittedValues(_Kit):
    part = FittedValues(2)


class TestCalibratedKeys(_Kit):
    part = CalibratedKeys(PATH)


class TestCalibratedValues(_Kit):
    part = CalibratedValues(PATH)
