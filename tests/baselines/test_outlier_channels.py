"""Case C16 over the baselines: keys of which two channels lie far off, as a bias of their projection makes them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qevict.contracts.quantizer import Origin, Quantizer, for_windows
from qevict.policy import Policy
from qevict_baselines.kivi import kivi
from qevict_baselines.kvquant import CalibratedKeys, nuq
from qevict_baselines.kvquant_calibration import Shown, calibrated
from qevict_baselines.oscar import oscar
from qevict_baselines.plain import int4
from qevict_baselines.zipcache import zipcache


def keys_of(policy: Policy) -> tuple[Quantizer, int]:
    """The quantizer of a policy's keys in its hottest coded tier, and how long a window is."""
    codec = policy.tiers[0].codec
    assert codec is not None
    return codec[0], policy.window_tokens


CODECS = {
    "int4": keys_of(int4()),
    "kivi": keys_of(kivi(bits=4)),
    "nuq": keys_of(nuq(bits=4)),
    "oscar": keys_of(oscar(bits=4)),
    "zipcache": keys_of(zipcache()),
}


FAVOURITES = {"zipcache": 0.78}
"""Queries that keep the key they attend to most: 0.85 of them, fewer under a grid over 256 tokens, bias or none."""


def scene(*, biased: bool) -> tuple[Tensor, Tensor]:
    """Keys and queries ``[256, 128]``."""
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(256, 128, generator=generator) for _ in range(2))
    if biased:
        keys[:, 3] += 60
        keys[:, 77] -= 45
    return keys, queries


def rebuilt(quantizer: Quantizer, keys: Tensor, window: int) -> Tensor:
    x = keys.view(1, -1, window, 128)
    shared = for_windows(quantizer.fit(x, Origin(0, (0,))), x.shape[1])
    return quantizer.decode({**quantizer.encode(x, shared), **shared}, 128).reshape(256, 128)


def check_attention(quantizer: Quantizer, window: int, keys: Tensor, queries: Tensor, least: float = 0.85) -> None:
    """Quality is judged by the attention that comes out, not by the error of what is rebuilt."""
    before, after = ((queries @ own.T / 128**0.5).softmax(1) for own in (keys, rebuilt(quantizer, keys, window)))
    assert 0 < (before - after).abs().sum(1).mean() / 2 < 0.08
    assert (before.argmax(1) == after.argmax(1)).float().mean() > least


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", CODECS)
def test_attention_keeps_its_shape_at_4_bits(name: str, biased: bool) -> None:
    check_attention(*CODECS[name], *scene(biased=biased), FAVOURITES.get(name, 0.85))


@pytest.mark.parametrize("biased", [False, True])
def test_so_it_does_when_calibrated(biased: bool, tmp_path: Path) -> None:
    keys, queries = scene(biased=biased)
    shown = Shown(*(each.view(256, 1, 128) for each in (keys, keys)), *(torch.ones(256, 1, 128) for _ in range(2)))
    file = f"{tmp_path}/calibration.safetensors"
    calibrated([shown], 4, 0.01).save(file)
    check_attention(CalibratedKeys(file), 8, keys, queries)
