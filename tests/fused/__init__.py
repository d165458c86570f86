"""Tests of the plugin ``qevict-fused``."""

import shutil
import sys

import pytest

from qevict_fused import native

needs_operator = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))

has_avx2 = native.missing() is None and native.instruction_set() == "avx2"

needs_avx2 = pytest.mark.skipif(not has_avx2, reason="this processor has no AVX2")

compiler = None if sys.platform == "win32" else shutil.which("g++") or shutil.which("clang++")
