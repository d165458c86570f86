"""The slow references of the quantisation papers say what the algorithms notes work out by hand."""

from fractions import Fraction
from typing import Any

import pytest

from tests.baselines import worked_quantised as worked
from tests.baselines.slow import kivi, kvquant, oscar, zipcache
from tests.baselines.slow.basics import mean


def rounded(value: Any, digits: int = 4) -> Any:
    """The value as the notes print it."""
    return [rounded(part, digits) for part in value] if isinstance(value, list | tuple) else round(value, digits)


def test_kivi_keys() -> None:
    channels = [groups[0] for groups in kivi.coded_keys(worked.KIVI_KEYS, 2, 16)]
    assert [each.step for each in channels] == worked.KIVI_KEY_STEPS
    assert [each.low for each in channels] == worked.KIVI_KEY_LOWS
    assert [each.codes for each in channels] == worked.KIVI_KEY_CODES
    assert [kivi.packed(each.codes, 2) for each in channels] == worked.KIVI_KEY_WORDS
    assert [list(each) for each in zip(*kivi.restored_keys(worked.KIVI_KEYS, 2, 16), strict=True)] == (
        worked.KIVI_KEYS_RESTORED
    )


def test_kivi_packs_word_after_word() -> None:
    """By hand: four codes of eight bits, the first in the lowest; a sign where the last is large."""
    assert kivi.packed([1, 2, 0, 0, 0, 0, 0, 128], 8) == [1 + 2 * 256, -(2**31)]


@pytest.mark.parametrize(("token", "group", "step", "low"), worked.KIVI_VALUE_GROUPS)
def test_kivi_values(token: int, group: int, step: float, low: float) -> None:
    [[coded]] = kivi.coded_values([worked.KIVI_VALUES[token][8 * group : 8 * group + 8]], 2, 8)
    assert (coded.codes, rounded(coded.step), rounded(coded.low)) == (worked.KIVI_VALUE_CODES, step, low)


def test_kivi_groups_of_a_token_are_neighbours() -> None:
    """By hand: each of two groups has a range of its own, whose ends come back."""
    assert kivi.restored_values([[0.0, 0.9, 3.0, 5.0, 5.1, 8.0]], 2, 3) == [[0, 1, 3, 5, 5, 8]]
    assert kivi.restored_keys([[0.0], [0.9], [3.0], [5.0], [5.1], [8.0]], 2, 3) == [[0], [1], [3], [5], [5], [8]]


def test_kivi_has_no_codes_for_a_constant_group() -> None:
    with pytest.raises(ZeroDivisionError):
        kivi.coded_values([worked.KIVI_VALUES[1]], 2, 8)


def test_kivi_bookkeeping() -> None:
    held = [kivi.after_prompt(10, 4)]
    for _ in worked.KIVI_TOKENS[1:]:
        held.append(kivi.after_token(held[-1], 4))
    assert held == worked.KIVI_TOKENS


@pytest.mark.parametrize(("tokens", "held"), [(3, (0, 3, 0, 3)), (4, (4, 0, 0, 4)), (8, (8, 0, 4, 4))])
def test_kivi_bookkeeping_of_prompts_at_the_edge(tokens: int, held: tuple[int, ...]) -> None:
    """Of keys nothing is left where the residual divides the prompt, of values always as much."""
    assert kivi.after_prompt(tokens, 4) == held


def test_kivi_bookkeeping_of_a_prompt_shorter_than_the_residual() -> None:
    held = kivi.after_token(kivi.after_prompt(3, 4), 4)
    assert (held, kivi.after_token(held, 4)) == ((4, 0, 0, 4), (4, 1, 1, 4))


@pytest.mark.parametrize(("bits", "group", "size"), worked.KIVI_BYTES)
def test_kivi_bytes(bits: int, group: int, size: int) -> None:
    assert kivi.token_bytes(8, 128, bits, group) == size


@pytest.mark.parametrize(("weights", "means", "cost"), worked.KVQUANT_CLUSTERS)
def test_kvquant_clusters(weights: list[float], means: list[float], cost: float) -> None:
    found = kvquant.weighted_means(worked.KVQUANT_NUMBERS, weights, 3)
    assert rounded(found.means) == means
    assert rounded(found.cost) == cost


@pytest.mark.parametrize(("numbers", "within", "outliers", "codes", "restored"), worked.KVQUANT_KEYS)
def test_kvquant_keys(
    numbers: list[float], within: tuple[float, float], outliers: list[bool], codes: list[int], restored: list[float]
) -> None:
    found = kvquant.key_channel(numbers, *within, worked.KVQUANT_LEVELS)
    assert (found.outliers, found.codes, rounded(found.restored)) == (outliers, codes, restored)


def test_kvquant_values() -> None:
    found = kvquant.value_token(worked.KVQUANT_VALUE, 0.25, worked.KVQUANT_LEVELS)
    assert found.outliers == worked.KVQUANT_VALUE_OUTLIERS
    assert found.codes == worked.KVQUANT_VALUE_CODES
    assert rounded(found.restored) == worked.KVQUANT_VALUE_RESTORED
    assert kvquant.value_range(worked.KVQUANT_VALUE, 0.25)[1:] == worked.KVQUANT_VALUE_RANGE


def test_kvquant_quantiles_of_a_token_are_outliers_themselves() -> None:
    """By hand: an eighth of nine numbers lies up to the second, and from the second to last."""
    outliers, *within = kvquant.value_range([0.4, -9.0, 0.2, 0.3, 0.0, 9.0, 0.6, 1.0, 0.5], 0.25)
    assert [at for at, outlier in enumerate(outliers) if outlier] == [1, 4, 5, 7]
    assert within == [0.2, 0.6]


def test_kvquant_quantiles_lie_between_numbers() -> None:
    assert kvquant.thresholds([4.0, 0.0, 1.0, 2.0, 8.0], 0.5) == (1, 4)
    assert kvquant.thresholds([4.0, 0.0, 1.0, 2.0, 8.0], 0.25) == (0.5, 6)


def test_kvquant_levels_of_keys_and_values() -> None:
    """By hand: outliers 9 and -9 have no say; of the rest, ranges of channels, or of tokens, become [-1, 1]."""
    lines = [[-9.0, 0.0, 0.2, 1.0, 9.0], [-9.0, 4.0, 5.6, 8.0, 9.0]]
    even = [[1.0] * 5] * 2
    assert rounded(kvquant.value_levels(lines, even, 0.4, 1)) == [-0.7, 1]
    assert rounded(kvquant.value_levels(lines, [[1.0, 1, 3, 1, 1]] * 2, 0.4, 1)) == [-0.55, 1]
    keys = [list(token) for token in zip(*lines, strict=True)]
    assert rounded(kvquant.key_levels(keys, [[1.0, 1.0]] * 5, 0.5, 1)) == [-0.7, 1]


@pytest.mark.parametrize(("bits", "channels", "in_all"), worked.KVQUANT_BITS)
def test_kvquant_bits(bits: int, channels: int, in_all: float) -> None:
    assert rounded(kvquant.bits_per_number(bits, channels), 3) == in_all


def test_zipcache_saliency() -> None:
    sums, means = zipcache.accumulated(worked.ZIPCACHE_ATTENTION), zipcache.normalised(worked.ZIPCACHE_ATTENTION)
    assert rounded(sums) == worked.ZIPCACHE_ACCUMULATED
    assert zipcache.ranked(rounded(sums)) == worked.ZIPCACHE_ACCUMULATED_RANKED
    assert means == pytest.approx(worked.ZIPCACHE_NORMALISED, abs=6e-4)
    assert zipcache.ranked(means) == worked.ZIPCACHE_NORMALISED_RANKED


def test_zipcache_saliency_by_probes() -> None:
    paper = zipcache.probed(worked.ZIPCACHE_ATTENTION, worked.ZIPCACHE_PROBES)
    code = zipcache.probed_by_code(worked.ZIPCACHE_ATTENTION, worked.ZIPCACHE_PROBES)
    assert rounded(paper) == worked.ZIPCACHE_PROBED
    assert rounded(code) == worked.ZIPCACHE_PROBED_BY_CODE
    salient = Fraction(6, 10)
    everything = zipcache.normalised(worked.ZIPCACHE_ATTENTION)
    assert [zipcache.others(scores, salient) for scores in (everything, code)] == [worked.ZIPCACHE_OTHERS] * 2
    both = zipcache.of_group([worked.ZIPCACHE_ATTENTION, worked.ZIPCACHE_ATTENTION], worked.ZIPCACHE_PROBES)
    assert rounded(both) == [2 * own for own in worked.ZIPCACHE_PROBED]


@pytest.mark.parametrize("bits", [4, 2])
def test_zipcache_values(bits: int) -> None:
    coded = zipcache.coded_values(worked.ZIPCACHE_VALUES, bits)
    assert coded.scales == worked.ZIPCACHE_SCALES
    assert zipcache.divided(worked.ZIPCACHE_VALUES, coded.scales) == worked.ZIPCACHE_DIVIDED
    assert [token.codes for token in coded.tokens] == worked.ZIPCACHE_CODES[bits]
    assert rounded(zipcache.restored_values(coded)) == worked.ZIPCACHE_RESTORED[bits]


def test_zipcache_values_without_scales_of_channels() -> None:
    unscaled = kivi.restored_values(worked.ZIPCACHE_VALUES, 2, 4)
    assert rounded(unscaled, 3) == worked.ZIPCACHE_UNSCALED
    scaled = zipcache.restored_values(zipcache.coded_values(worked.ZIPCACHE_VALUES, 2))
    assert rounded([squared_error(scaled), squared_error(unscaled)]) == worked.ZIPCACHE_SQUARED_ERRORS


def squared_error(found: list[list[float]]) -> float:
    pairs = zip(worked.ZIPCACHE_VALUES, found, strict=True)
    return mean([(a - b) ** 2 for own, other in pairs for a, b in zip(own, other, strict=True)])


def test_zipcache_keys_are_coded_by_channel() -> None:
    assert [each.codes for each in zipcache.coded_keys([[0.0, 9.0], [1.0, 3.0], [3.0, 0.0]], 2)] == [
        [0, 1, 3],
        [3, 1, 0],
    ]


def test_zipcache_packs_quarters_and_halves() -> None:
    codes, packed = worked.ZIPCACHE_PACKED
    assert zipcache.packed(codes, 2) == packed
    assert zipcache.packed([1, 2, 3, 4], 4) == [1 + 3 * 16, 2 + 4 * 16]


def test_zipcache_bytes() -> None:
    for share, bits in worked.ZIPCACHE_CODE_BITS:
        assert rounded(zipcache.code_bits(share)) == bits
    found = zipcache.token_bytes(8, 128, 4096, 0.6)
    assert rounded(found, 2) == worked.ZIPCACHE_BYTES
    assert rounded(2 * 8 * 128 * 2 / found, 3) == worked.ZIPCACHE_TIMES_SMALLER


def test_oscar() -> None:
    keys = worked.OSCAR_KEYS
    assert rounded(oscar.norms(oscar.rotated(keys))) == worked.OSCAR_NORMS
    assert rounded(oscar.rotated(oscar.rotated(keys)), 12) == keys
    assert rounded(oscar.errors(keys, oscar.by_channel(keys)), 3) == worked.OSCAR_ERRORS
    assert rounded(oscar.errors(keys, oscar.by_rotated_channel(keys)), 3) == worked.OSCAR_ROTATED_ERRORS
    assert rounded(oscar.errors(keys, oscar.restored(keys)), 3) == worked.OSCAR_SCALED_ERRORS
