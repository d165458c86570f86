"""Every Python block of README and documentation runs, on the real model where it asks for it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{index}", marks=[pytest.mark.real] if "load()" in block else [])
    for page in PAGES
    for index, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str) -> None:
    exec(compile(block, "documentation", "exec"), {})  # noqa: S102 - the documentation's own code


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 4
