"""KVQuant's calibration against slow references, and the file that holds it."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qevict.errors import PolicyError
from qevict_baselines.kvquant_calibration import (
    Calibration,
    Shown,
    best_levels,
    calibrated,
    joined,
    load,
    quantiles,
    wide,
)
from tests.baselines import worked_quantised as worked
from tests.baselines.slow import kvquant


def close(found: Tensor, wanted: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=found.dtype), rtol=tolerance, atol=tolerance)


def shown(tokens: int, heads: int = 2, channels: int = 4, seed: int = 0) -> Shown:
    """Tokens whose numbers lie on a coarse grid, so that no bin of a histogram holds two different ones."""
    dice = torch.Generator().manual_seed(seed)
    size = (2, tokens, heads, channels)
    keys, values = torch.randint(-40, 40, size, generator=dice).float()
    return Shown(keys, values, *torch.rand(size, generator=dice))


def some_calibration(bits: int = 2, **changes: Any) -> Calibration:
    return attrs.evolve(calibrated([shown(9, seed=0), shown(9, seed=1)], bits, 0.1), **changes)


@pytest.mark.parametrize(("weights", "means", "_cost"), worked.KVQUANT_CLUSTERS)
def test_levels_are_those_of_the_worked_example(weights: list[float], means: list[float], _cost: float) -> None:
    """Algorithms notes, section 9: a number that matters eight times as much draws its level to itself."""
    found = best_levels(torch.tensor(worked.KVQUANT_NUMBERS), torch.tensor(weights), 3)
    close(found, means)


@pytest.mark.parametrize(("seed", "count"), [*itertools.product(range(6), [2, 4, 5])])
def test_levels_are_the_best_of_all(seed: int, count: int) -> None:
    chance = random.Random(seed)
    numbers = [chance.randint(-100, 100) / 100 for _ in range(11)]
    weights = [chance.random() for _ in numbers]
    best = kvquant.weighted_means(numbers, weights, count)
    found = best_levels(torch.tensor(numbers), torch.tensor(weights), count).tolist()
    cost = sum(weight * min(abs(number - level) for level in found) ** 2 for number, weight in zip(numbers, weights))  # noqa: B905 - as long
    assert cost == pytest.approx(best.cost, abs=1e-9)
    close(torch.tensor(found), best.means)


def test_levels_ascend_also_where_there_are_fewer_numbers_than_levels() -> None:
    for numbers, weights in [([0.5, 0.5], [1.0, 1.0]), ([-1.0, 1.0], [0.0, 0.0]), ([], [])]:
        found = best_levels(torch.tensor(numbers), torch.tensor(weights), 16)
        assert bool((found.diff() > 0).all())
        assert float(found.abs().max()) <= 1
        assert not numbers or weights[0] == 0 or float((found - numbers[0]).abs().min()) < 1e-6


def test_quantiles_lie_where_torch_says() -> None:
    numbers = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    low, high = quantiles(numbers, 0, 0.13)
    close(low, torch.quantile(numbers, 0.065, dim=0))
    close(high, torch.quantile(numbers, 0.935, dim=0))
    assert [ends.tolist() for ends in quantiles(numbers, 0, 0.0)] == [each.tolist() for each in numbers.aminmax(dim=0)]


@pytest.mark.parametrize(("heads", "channels"), [(2, 5), (1, 9)], ids=["between numbers", "quantiles are numbers"])
def test_ranges_and_levels_are_those_of_the_loops(heads: int, channels: int) -> None:
    """Channels of all heads side by side for the keys; for the values a line is one token of one head."""
    layer = shown(5, heads, channels)
    found = calibrated([layer], 2, 0.25)
    keys, weights = layer.keys.flatten(1), layer.key_weights.flatten(1)
    wanted = [kvquant.thresholds(channel, 0.25) for channel in keys.T.tolist()]
    close(torch.stack((found.key_low, found.key_high), -1).flatten(0, 2), wanted)
    close(found.key_levels[0], kvquant.key_levels(keys.tolist(), weights.tolist(), 0.25, 2), 3e-3)
    lines, own = (each.flatten(0, 1).tolist() for each in (layer.values, layer.value_weights))
    close(found.value_levels[0], kvquant.value_levels(lines, own, 0.25, 2), 3e-3)


def test_every_layer_has_its_own_numbers() -> None:
    layers = [shown(9, seed=seed) for seed in range(3)]
    together = calibrated(layers, 2, 0.1)
    for at, layer in enumerate(layers):
        alone = calibrated([layer], 2, 0.1)
        for name in ("key_low", "key_high", "key_levels", "value_levels"):
            assert getattr(together, name)[at].equal(getattr(alone, name)[0])


def test_weights_draw_levels_to_what_matters() -> None:
    layer = shown(30)
    heavy = attrs.evolve(layer, key_weights=torch.where(layer.keys > 20, 100.0, 0.01))
    before, after = (calibrated([each], 2, 0.01).key_levels[0] for each in (layer, heavy))
    assert int((after > 0.3).sum()) > int((before > 0.3).sum())


def test_constant_numbers_get_a_range_all_the_same() -> None:
    layer = shown(9)
    flat = attrs.evolve(layer, keys=torch.full_like(layer.keys, 300.0), values=torch.zeros_like(layer.values))
    found = calibrated([flat], 3, 0.01)
    assert bool((found.key_low == 300).all())
    assert bool((found.key_high > found.key_low).all())
    low, high = wide(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))
    assert (low.tolist(), high[0].item()) == ([1, 0], 2)


def test_texts_are_joined_token_by_token() -> None:
    one, other = shown(3, seed=1), shown(4, seed=2)
    together = joined([one, other])
    assert together.keys.equal(torch.cat((one.keys, other.keys)))
    assert together.some(torch.tensor([1, 5])).value_weights.equal(
        torch.stack((one.value_weights[1], other.value_weights[2]))
    )


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_file_holds_everything(tmp_path: Path, bits: int) -> None:
    path, made = tmp_path / "some.safetensors", some_calibration(bits, model="a model", samples=3, tokens=9)
    made.save(path)
    found = load(path)
    assert found == made
    assert hash(found) == hash(made)
    for field in attrs.fields(Calibration):
        one, other = getattr(found, field.name), getattr(made, field.name)
        assert one.equal(other) if isinstance(one, Tensor) else one == other


def test_equal_are_those_that_code_alike() -> None:
    made = some_calibration()
    assert made == attrs.evolve(made, model="renamed", outliers=0.2)
    assert made != attrs.evolve(made, key_high=made.key_high + 1)
    assert made != attrs.evolve(made, value_levels=made.key_levels, key_levels=made.value_levels)
    assert "tensor" not in repr(made)


REFUSED: dict[str, tuple[Callable[[Calibration], dict[str, Any]], str]] = {
    "bits": (lambda _: {"bits": 5}, "codes have 2, 3 or 4 bits, not 5"),
    "outliers": (lambda _: {"outliers": 1.0}, "outliers are a part of all numbers, from 0 to below 1, not 1.0"),
    "levels of other bits": (lambda _: {"bits": 3}, r"levels are \[layers, 2\^bits\] = \(2, 8\), got \(2, 4\) and"),
    "no ranges": (lambda made: {"key_low": made.key_low[:1]}, r"ranges are \[layers, kv_heads, head_dim\], got \(1,"),
    "an axis less": (
        lambda made: {"key_low": made.key_low[0], "key_high": made.key_high[0]},
        r"ranges are \[layers, kv_heads, head_dim\]",
    ),
    "empty ranges": (lambda made: {"key_high": made.key_low}, "lower end of a range must lie below the upper one"),
    "levels down": (lambda made: {"key_levels": made.key_levels.flip(1)}, "levels of a layer ascend, from -1 to 1"),
    "levels beyond": (lambda made: {"value_levels": made.value_levels * 3}, "levels of a layer ascend, from -1 to 1"),
    "no numbers": (lambda made: {"key_low": made.key_low * torch.nan}, "key_low must hold finite numbers in fp32"),
    "another dtype": (lambda made: {"key_levels": made.key_levels.double()}, "key_levels must hold finite numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_calibration_is_refused(case: str) -> None:
    changes, message = REFUSED[case]
    made = some_calibration()
    with pytest.raises(PolicyError, match=rf"this is no calibration: .*{message}.*; make one with python -m"):
        attrs.evolve(made, **changes(made))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    with pytest.raises(PolicyError, match=r"cannot read the calibration .*some.safetensors'"):
        load(path)
    path.write_bytes(b"no tensors")
    with pytest.raises(PolicyError, match="cannot read the calibration"):
        load(path)
    save_file({"keys.low": torch.zeros(1)}, path)
    with pytest.raises(PolicyError, match=r"is no calibration: it lacks keys.high, keys.levels, values.levels, bits,"):
        load(path)
    made = some_calibration()
    names = {"keys.low": made.key_low, "keys.high": made.key_high}
    names |= {"keys.levels": made.key_levels, "values.levels": made.value_levels}
    words = {"bits": "two", "outliers": "0.1", "samples": "1", "tokens": "1", "model": ""}
    save_file(names, path, metadata=words)
    with pytest.raises(PolicyError, match=r"in its metadata, invalid literal .* 'two'"):
        load(path)
