"""The flash backend keeps the laws of backends, over pools cut in every way."""

from qevict.backends.flash import FlashAttention
from qevict.testing import BackendContract


class TestFlashAttention(BackendContract):
    part = FlashAttention()
    examples = 60
