"""Settings and fixtures for all tests."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch

# Tiny models on several threads mostly wait for each other.
torch.set_num_threads(1)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Bad input comes from callers whose types nobody checks."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
