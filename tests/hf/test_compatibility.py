"""Every cell of the compatibility page: what it says is what happens."""

import pytest
from tests.hf import compatibility
from tests.hf.compatibility import DEMANDED, WAYS
from tests.oracle import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_cell(way: str, family: str) -> None:
    found, told = compatibility.outcome(family, way), compatibility.told(family, way)
    assert found in told.split("\n"), f"write the page anew: python -m tests.hf.compatibility\n{found}"
    if (family, way) in DEMANDED:
        assert found == told == "works"


def test_the_rest_of_the_page() -> None:
    found = compatibility.page({(family, way): "works" for family in FAMILIES for way in WAYS})
    told = compatibility.PAGE.read_text("utf-8")
    assert compatibility.TITLES.keys() == FAMILIES.keys()
    assert told.split("## Refusals")[0].replace("refused", "works") == found.split("## Refusals")[0].replace(
        "refused", "works"
    )
