"""What all contracts share: wrong test classes are refused, and reports say everything."""

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from tests.breaking import Break, passes, report

import qevict.testing
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.cumulative import CumulativeAttention
from qevict.testing import Contract, LawBroken, ScorerContract

CONTRACTS = [value for name in qevict.testing.__all__ if isinstance(value := getattr(qevict.testing, name), type)]
CONTRACTS = [each for each in CONTRACTS if issubclass(each, Contract)]


def test_a_class_without_a_part_is_told_to_name_one() -> None:
    with pytest.raises(TypeError, match=r"TestNothing has no part; write `part = MyScorer\(\)` in it, an instance of"):
        type("TestNothing", (ScorerContract,), {})


def test_a_part_of_another_kind_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"TestRouter has GreedyTiers\(.*\) as its part; .*qevict.contracts.scorer.Scorer"
    ):
        type("TestRouter", (ScorerContract,), {"part": GreedyTiers()})


def test_a_class_in_place_of_an_instance_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        TypeError, match=r"has the class CumulativeAttention as its part; write `part = CumulativeAttent"
    ):
        type("TestScorer", (ScorerContract,), {"part": CumulativeAttention})


def test_a_contract_may_be_derived_without_a_part() -> None:
    class MyContract(ScorerContract):
        examples: ClassVar[int] = 1

    passes(MyContract, CumulativeAttention(), "test_states_and_rankings_are_fp32")


class Unequal(CumulativeAttention):
    """Equal to itself only."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


@attrs.frozen
class Nameless(CumulativeAttention):
    name: ClassVar[str] = ""


@attrs.frozen
class TakesMore(CumulativeAttention):
    def rank(self, state: Any, windows: Any, device: Any) -> Any:  # type: ignore[override]
        return {}


def test_the_laws_that_all_parts_share_are_proven() -> None:
    report(ScorerContract, Break("test_it_is_a_frozen_value", Unequal(), "does not compare equal"))
    report(ScorerContract, Break("test_the_registry_takes_it", Nameless(), "give the class one"))
    report(ScorerContract, Break("test_the_registry_takes_it", TakesMore(), "is called with (self, state, windows)"))


def test_a_part_that_can_be_changed_is_found() -> None:
    class Loose(CumulativeAttention):
        def __setattr__(self, name: str, value: object) -> None:
            object.__setattr__(self, name, value)

    report(ScorerContract, Break("test_it_is_a_frozen_value", Loose(), "a field can be set"))


def test_what_a_part_raises_is_reported_with_its_traceback() -> None:
    @attrs.frozen
    class Fails(CumulativeAttention):
        def rank(self, state: Any, windows: Any) -> Any:
            raise ZeroDivisionError("somewhere inside")

    with pytest.raises(LawBroken, match="it raised ZeroDivisionError: somewhere inside") as caught:
        passes(ScorerContract, Fails(), "test_states_and_rankings_are_fp32")
    assert any("in rank" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_every_law_says_in_words_what_it_is(contract: type[Contract[Any, Any]]) -> None:
    for name in dir(contract):
        if name.startswith("test_"):
            assert len(name.split("_")) >= 4


def run_pytest(tmp_path: Path, text: str) -> str:
    (tmp_path / "test_mine.py").write_text(text, "utf-8")
    argv = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "-c",
        str(tmp_path / "none.ini"),
    ]
    (tmp_path / "none.ini").write_text("[pytest]\n", "utf-8")
    done = subprocess.run([sys.executable, *argv, str(tmp_path)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_pytest_collects_the_class_of_the_author_and_nothing_else(tmp_path: Path) -> None:
    """As in a repository of its own: default settings of pytest, and a report that can be read."""
    said = run_pytest(
        tmp_path,
        """
import attrs
from qevict.scorers.cumulative import CumulativeAttention
from qevict.testing import *

@attrs.frozen
class Doubles(CumulativeAttention):
    def rank(self, state, windows):
        return {"importance": state["mass"].double()}

class TestDoubles(ScorerContract):
    part = Doubles()
""",
    )
    laws = len([name for name in dir(ScorerContract) if name.startswith("test_")])
    assert f"1 failed, {laws - 1} passed" in said
    assert "Doubles(prompt_queries=None, prompt_stride=1, observe_tokens=None) breaks a law of its contract" in said
    assert "law: fp32, whatever dtype the model computes in." in said
    assert "found: ranking 'importance' is torch.float64" in said
    assert "smallest case: ScorerCase(rows=1, lanes_per_row=1, heads=1, windows=1" in said


@pytest.mark.parametrize("missing", ["hypothesis", "pytest"])
def test_without_its_extra_the_kit_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import qevict.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'pip install "qevict[testing]"' in done.stderr


def test_importing_qevict_asks_for_neither() -> None:
    code = "import sys, qevict; assert not {'hypothesis', 'pytest', 'qevict.testing'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
