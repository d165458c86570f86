"""Every Python block of README and documentation runs, on the real model where it asks for it; every policy loads."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import qevict

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def find_blocks(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
        yield from ((f"{page.name}-{index}", block) for index, block in enumerate(found))


BLOCKS = [
    pytest.param(block, id=name, marks=[pytest.mark.real] if "load()" in block else [])
    for name, block in find_blocks("python")
]
POLICIES = [pytest.param(block, id=name) for name, block in find_blocks("toml") if "schema =" in block]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str) -> None:
    exec(compile(block, "documentation", "exec"), {})  # noqa: S102 - the documentation's own code


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_loads(policy: str) -> None:
    assert qevict.loads(qevict.dumps(qevict.loads(policy))) == qevict.loads(policy)


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 4
    assert len(POLICIES) >= 2
