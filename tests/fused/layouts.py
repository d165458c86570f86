"""Layouts of codes that the operator reads, by what they share."""

import torch

from qevict.quantizers.affine import PerChannel, PerToken
from qevict.testing.scenes import Codecs

BITS = (2, 3, 4, 8)

PLAIN: Codecs = tuple((PerChannel(bits), PerToken(bits)) for bits in BITS)

SCOPES: Codecs = (
    (PerChannel(2, scope="sequence"), PerToken(2, group_channels=16)),
    (PerChannel(3, torch.float32, scale_bits=4), PerToken(3, torch.float32, scale_bits=8)),
    (PerChannel(4, torch.bfloat16, scope="sequence", scale_bits=8), PerToken(4, torch.bfloat16, scale_bits=4)),
)

TRANSFORMED: Codecs = (
    (PerChannel(2, centred=True, rotated=True), PerToken(2, centred=True, channel_scaled=True, rotated=True)),
    (PerChannel(3, normed=True, levels="normal"), PerToken(4, levels="normal", group_channels=8)),
    (PerChannel(3, scale_bits=4, centred=True, rotated=True, normed=True), PerToken(2, group_channels=4, rotated=True)),
    (PerChannel(8, rotated=True), PerToken(8, channel_scaled=True)),
)
