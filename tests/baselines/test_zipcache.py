"""ZipCache's saliency and split against the slow reference, and the worked values of the notes, section 10."""

from fractions import Fraction
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qevict
from qevict.contracts.scorer import IMPORTANCE
from qevict.contracts.values import PROTECTED, Observation
from qevict.errors import PolicyError
from qevict.ledgers.re_encoding import ReEncoding
from qevict.policy import Policy, Tier
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.stores.memory import DeviceMemory
from qevict.testing import RouterContract, ScorerContract
from qevict_baselines.zipcache import ProbeSaliency, SalientShare
from tests.baselines import worked_quantised as worked
from tests.baselines.shown import close, ranked, windows
from tests.baselines.slow import zipcache
from tests.oracle import prompts, tiny
from tests.routers.by_loop import Scene, layer_of, scene_of


class TestProbeSaliency(ScorerContract):
    examples = 8
    part = ProbeSaliency()


class TestSalientShare(RouterContract):
    examples = 8
    part = SalientShare()


class TestSalientShareOfNone(RouterContract):
    examples = 4
    part = SalientShare(0.0)


def causal(*size: int, seed: int = 0) -> Tensor:
    """Attention, ``[*lead, queries, keys]``."""
    weights = torch.rand(size, generator=torch.Generator().manual_seed(seed)).tril(size[-1] - size[-2])
    return weights / weights.sum(-1, keepdim=True)


def looked(rows: Tensor, probes: list[int], keys: int, tokens: list[int], **shown: Any) -> Observation:
    """Masses of some queries, ``rows[lane][query_head][query][key]``, over windows of one token."""
    columns = torch.tensor(tokens).expand(len(rows), -1)
    positions = torch.arange(keys).expand(len(rows), -1)
    return Observation(columns, keys, mass=rows[:, :, probes].sum(2), positions=positions, **shown)


def saliency(rows: Tensor, stride: int) -> tuple[Tensor, list[int]]:
    """Of a prompt in one piece."""
    tokens = rows.shape[-1]
    probes = list(range(tokens - 1, -1, -stride))
    seen = looked(rows, probes, tokens, list(range(tokens)), stands_for=float(stride), ends_prompt=True)
    return ranked(ProbeSaliency(stride), [seen], windows(len(rows), tokens)), probes


def test_the_worked_example() -> None:
    """Probes 3 and 5 are every second query, less query 1, which has nothing but its own to say to keys 0 and 1."""
    attention = torch.tensor(worked.ZIPCACHE_ATTENTION)[None, None]
    attention[:, :, 1] = 0
    found, probes = saliency(attention, 2)
    assert probes == [5, 3, 1]
    seen_by = torch.tensor([3 / 2, 3 / 2, 1, 1, 1, 1])  # by one probe more
    close(found[0] * seen_by, worked.ZIPCACHE_PROBED)
    found, _ = saliency(torch.tensor(worked.ZIPCACHE_ATTENTION)[None, None], 1)
    close(found[0], worked.ZIPCACHE_NORMALISED, 6e-4)


@pytest.mark.parametrize(("tokens", "stride"), [(7, 1), (23, 10), (30, 10), (31, 10), (5, 10), (1, 10)])
def test_saliency_is_that_of_the_slow_reference(tokens: int, stride: int) -> None:
    """Over two KV heads of two query heads each."""
    attention = causal(2, 2, tokens, tokens)
    found, probes = saliency(attention, stride)
    close(found, [zipcache.of_group(heads, probes) for heads in attention.tolist()])


def test_a_prompt_in_pieces_and_what_is_decoded() -> None:
    """Behind the prompt every query is a probe: the slow reference over all of them, each tenth standing for ten."""
    prompt, all_of_it = 23, 27
    attention = causal(1, 2, all_of_it, all_of_it)
    pieces = [range(9), range(9, 20), range(20, 23)]
    probes = [range(2, 9, 10), range(12, 20, 10), range(22, 23)]
    seen = [
        looked(attention, list(own), all_of_it, list(piece), stands_for=10.0, ends_prompt=piece.stop == prompt)
        for own, piece in zip(probes, pieces, strict=True)
    ]
    seen += [looked(attention, [at], all_of_it, [at]) for at in range(prompt, all_of_it)]
    found = ranked(ProbeSaliency(), seen, windows(1, all_of_it))
    asked = [query for query in (2, 12, 22) for _ in range(10)] + list(range(prompt, all_of_it))
    close(found, [zipcache.of_group(attention[0].tolist(), asked)])


def test_windows_of_several_tokens_count_the_probes_from_their_first_token_on() -> None:
    """By hand: twelve tokens, of which the first is a sink, in windows of four, every fifth query a probe."""
    positions = torch.tensor([[1, 5, 9]])
    columns = torch.tensor([[-1, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]])
    mass = torch.tensor([[[0.6, 0.6, 0.6]]])
    seen = Observation(columns, 3, mass=mass, stands_for=5.0, positions=positions, ends_prompt=True)
    now = attrs.evolve(windows(1, 3, length=12), positions=positions)
    close(ranked(ProbeSaliency(5), [seen], now), [[0.6 / 3, 0.6 / 2, 0.6]])  # probes 1, 6, 11


@pytest.mark.parametrize("stride", [0, -1, True])
def test_a_stride_is_a_count(stride: Any) -> None:
    with pytest.raises(PolicyError, match="prompt_stride is a whole number of at least 1"):
        ProbeSaliency(stride)


@given(seed=st.integers(0, 2**31), tenths=st.sampled_from([0, 3, 4, 6, 10]))
@settings(deadline=None, max_examples=60)
def test_without_a_budget_the_lowest_get_fewer_bits_and_nothing_goes(seed: int, tenths: int) -> None:
    scene = unlimited(scene_of(seed, ties=False))
    plan = scene.ask(SalientShare(tenths / 10))
    assert plan.counts is not None
    for place, own, scores in zip(plan.place.tolist(), scene.candidate, scene.scores[IMPORTANCE], strict=True):
        columns = [column for column, candidate in enumerate(own) if candidate]
        others = zipcache.others([scores[column] for column in columns], Fraction(tenths, 10))
        wanted = [PROTECTED] * len(own)
        for at, column in enumerate(columns):
            wanted[column] = int(at in others)
        assert place == wanted


def unlimited(scene: Scene) -> Scene:
    """Two tiers and no budget; whoever keeps codes keeps those of the second tier."""
    kept = None if scene.kept is None else [[[False, own[-1]] for own in lane] for lane in scene.kept]
    limits = (None,) * len(scene.capacities)
    return scene._replace(tier_bytes=(9, 5), tenths=(6, 4), kept=kept, capacities=limits)


@pytest.mark.parametrize(
    ("capacity", "hot", "cold"), [(100, 6, 4), (32, 6, 4), (31, 6, 3), (29, 5, 3), (10, 2, 1), (9, 2, 0), (3, 0, 0)]
)
def test_with_a_budget_the_best_stay_and_are_split(capacity: int, hot: int, cold: int) -> None:
    """By hand: of ten windows six take 4 bytes, the others 2; of nine six, of eight five, of three two, of two two."""
    scene = layer_of({IMPORTANCE: [[float(-at) for at in range(10)]]}, capacity)
    plan = scene._replace(tier_bytes=(4, 2), tenths=(6, 4)).ask(SalientShare())
    gone = 10 - hot - cold
    assert plan.place.tolist() == [[0] * hot + [1] * cold + [2] * gone]
    assert plan.counts == ((hot, cold),)


def test_codes_that_are_kept_are_paid_for() -> None:
    """By hand: of six windows four are hot, and two of them keep codes, which takes both places of the second tier."""
    scene = layer_of({IMPORTANCE: [[float(-at) for at in range(6)]]}, 20)
    kept = [[[False, at < 2] for at in range(6)]]
    plan = scene._replace(tier_bytes=(4, 2), tenths=(6, 4), kept=kept).ask(SalientShare())
    assert plan.place.tolist() == [[0, 0, 0, 0, 2, 2]]
    assert plan.counts is None


@pytest.mark.parametrize("tiers", [1, 3])
def test_other_numbers_of_tiers_are_refused(tiers: int) -> None:
    with pytest.raises(PolicyError, match=rf"splits windows over two tiers, got {tiers}; give two tiers, hot to cold"):
        SalientShare().check(tiers)


@pytest.mark.parametrize("share", [-0.1, 1.1, True, "0.6"])
def test_a_share_is_a_part(share: Any) -> None:
    with pytest.raises(PolicyError, match="salient is a part of a whole"):
        SalientShare(share)


def test_a_model_runs_with_them() -> None:
    """Four and two bits, everything kept, four of ten windows in the cold tier, and nobody keeps copies."""
    tiers = [Tier(f"int{bits}", PerChannel(bits), PerToken(bits), store=DeviceMemory()) for bits in (4, 2)]
    policy = Policy(
        scorer=ProbeSaliency(),
        router=SalientShare(),
        tiers=tiers,
        ledger=ReEncoding(),
        sink_tokens=0,
        recent_tokens=0,
        granularity="kv_head",
    )
    model, [ids, _] = tiny(num_hidden_layers=2), prompts(56)
    with qevict.attach(model, policy) as session:
        cache = session.prefill(ids)
        for aged in (6, 7, 8, 9):  # the newest token is protected, and so is its window
            report, others = cache.report(), 2 * aged // 5
            lanes = 2 * 2  # layers, KV heads
            assert (report.windows["int4"], report.windows["int2"]) == (lanes * (aged - others), lanes * others)
            session.generate(torch.tensor([[7]]), cache=cache, max_new_tokens=8, do_sample=False)
    assert report.evictions == 0
    assert min(report.promotions, report.demotions) > 0
    assert report.bytes_by_kind["ledger copies"] == 0
