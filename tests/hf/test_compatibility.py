"""Every cell of the compatibility page: what it says is what happens."""

import re

import pytest
from tests.hf import compatibility
from tests.hf.compatibility import DEMANDED, WAYS
from tests.oracle import FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
def test_cell(way: str, family: str) -> None:
    found, told = compatibility.outcome(family, way), compatibility.told(family, way)
    assert found in told.split("\n"), f"write the page anew: python -m tests.hf.compatibility\n{found}"
    if (family, way) in DEMANDED:
        assert found == told == "works"


def test_the_rest_of_the_page() -> None:
    assert compatibility.TITLES.keys() == FAMILIES.keys()
    made = compatibility.page({(family, way): "works" for family in FAMILIES for way in WAYS})
    told, wanted = (_without_outcomes(text) for text in (compatibility.PAGE.read_text("utf-8"), made))
    assert told == wanted


def _without_outcomes(page: str) -> str:
    """Without refusals, and the version that wrote it."""
    text = page.split("## Refusals", maxsplit=1)[0].replace("| refused ", "| works ")
    return re.sub(r"under transformers \S+", "under transformers", text)
