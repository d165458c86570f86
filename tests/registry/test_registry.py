"""Names become classes; a miss says what could be meant."""

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from qevict.contracts.scorer import Scorer
from qevict.errors import DuplicatePartError, PluginError, UnknownPartError
from qevict.registry import PluginWarning, Registry, Switches, default_registry
from qevict.registry.kinds import KINDS
from qevict.scorers.recency import Recency

Write = Callable[..., None]
Code = Callable[[str], str]
EntryPoints = Callable[[], tuple[EntryPoint, ...]]

BUILT_IN = {
    "scorer": ["cumulative", "recency"],
    "quantizer": ["per_channel", "per_token"],
    "router": ["cover_first", "greedy"],
    "ledger": ["migration_stable", "re_encoding"],
    "backend": ["flash", "reference"],
    "store": ["device"],
    "preset": ["evict_only", "four_tiers", "full", "qevict", "sinks_recent"],
}


def registry(entry_points: EntryPoints) -> Registry:
    return Registry(entry_points(), Switches())


def failures(of: Registry) -> list[str]:
    with pytest.warns(PluginWarning):
        return [str(failure) for failure in of.inventory().failures]


def test_the_built_in_parts_are_there_and_whole() -> None:
    inventory = Registry(entry_points=()).inventory()

    assert not inventory.failures
    assert {kind: [p.name for p in inventory.parts if p.kind == kind] for kind in KINDS} == BUILT_IN
    assert {part.source.distribution for part in inventory.parts} == {"qevict"}


def test_a_name_becomes_its_class() -> None:
    assert Registry(entry_points=()).get("scorer", "recency") is Recency


def test_the_default_registry_is_made_once() -> None:
    assert default_registry() is default_registry()


def test_a_miss_says_what_was_meant_and_what_is_known() -> None:
    with pytest.raises(
        UnknownPartError, match=r"(?s)no scorer is named 'cumulativ'.*'cumulative'\?.*known: cumulative, recency"
    ):
        Registry(entry_points=()).get("scorer", "cumulativ")


def test_a_miss_says_that_the_name_is_of_another_kind() -> None:
    with pytest.raises(UnknownPartError, match="'greedy' is a router"):
        Registry(entry_points=()).get("scorer", "greedy")


@pytest.mark.parametrize("name", ["", "1.0", "x" * 1000])
def test_a_strange_name_is_unknown(name: str) -> None:
    with pytest.raises(UnknownPartError, match="known: per_channel, per_token"):
        Registry(entry_points=()).get("quantizer", name)


def test_an_unknown_kind_is_refused_with_the_kinds() -> None:
    with pytest.raises(UnknownPartError, match="'scorers'; the kinds are scorer, quantizer"):
        Registry(entry_points=()).get("scorers", "recency")


def test_a_plugin_is_found_by_the_name_on_its_class(
    site: Path, write: Write, scorer_code: Code, entry_points: EntryPoints
) -> None:
    write(site, "qevict-mine", scorer_code("other_name"))

    found = registry(entry_points).get("scorer", "other_name")

    assert issubclass(found, Scorer)
    assert found.__module__ == "qevict_mine"


def test_a_plugin_may_be_an_object_with_hooks(site: Path, write: Write, entry_points: EntryPoints) -> None:
    code = """
from qevict.registry import hookimpl
from qevict.scorers.recency import Recency
class Latest(Recency):
    name = "latest"
class Plugin:
    @hookimpl
    def qevict_scorers(self):
        yield Latest
plugin = Plugin()
"""
    write(site, "qevict-mine", code, value="qevict_mine:plugin")

    assert registry(entry_points).get("scorer", "latest").__name__ == "Latest"


def test_plugins_stay_unimported_while_built_ins_are_asked_for(
    site: Path, write: Write, scorer_code: Code, entry_points: EntryPoints
) -> None:
    write(site, "qevict-mine", scorer_code("mine"))
    ours = registry(entry_points)

    ours.get("scorer", "recency")

    assert "qevict_mine" not in sys.modules


def test_a_clash_takes_the_name_from_both_and_names_both(
    site: Path, write: Write, scorer_code: Code, entry_points: EntryPoints
) -> None:
    write(site, "qevict-one", scorer_code("twin"))
    write(site, "qevict-two", scorer_code("twin"))
    ours = registry(entry_points)

    assert all("qevict-one 1.0" in text and "qevict-two 1.0" in text for text in failures(ours))
    assert "twin" not in {part.name for part in ours.inventory().parts}
    with pytest.raises(DuplicatePartError, match=r"'twin' is offered 2 times: .*qevict-one.*qevict-two"):
        ours.get("scorer", "twin")


def test_a_clash_costs_nobody_the_other_parts(
    site: Path, write: Write, scorer_code: Code, entry_points: EntryPoints
) -> None:
    second = "\nclass More(Part):\n    name = 'more'\n@hookimpl\ndef qevict_scorers(): return [Part, More]\n"
    write(site, "qevict-one", scorer_code("twin") + second)
    write(site, "qevict-two", scorer_code("twin"))
    ours = registry(entry_points)

    with pytest.warns(PluginWarning, match="twin"):
        assert ours.get("scorer", "more").__name__ == "More"
    assert ours.get("scorer", "recency") is Recency


def test_a_built_in_keeps_its_name_whatever_was_loaded_before(
    site: Path, write: Write, scorer_code: Code, entry_points: EntryPoints
) -> None:
    write(site, "qevict-usurper", scorer_code("recency"))
    ours = registry(entry_points)

    assert ours.get("scorer", "recency") is Recency
    [told] = failures(ours)
    assert ours.get("scorer", "recency") is Recency
    assert "'recency' is offered 2 times" in told
    assert "qevict-usurper 1.0" in told
    assert "keeps its name" in told


def test_one_module_under_two_entry_points_of_one_distribution_is_no_clash(
    site: Path, write: Write, scorer_code: Code, entry_points: EntryPoints
) -> None:
    write(site, "qevict-mine", scorer_code("mine"), value="qevict_mine\nagain = qevict_mine")

    assert registry(entry_points).get("scorer", "mine").__module__ == "qevict_mine"


def test_a_part_that_failed_is_recognised_by_its_own_name(
    site: Path, write: Write, scorer_code: Code, entry_points: EntryPoints
) -> None:
    write(site, "qevict-half", scorer_code("half_done").replace("def rank", "def rang"))

    with pytest.warns(PluginWarning), pytest.raises(PluginError, match=r"qevict-half 1.0.*implement rank"):
        registry(entry_points).get("scorer", "half_done")


BACKEND = """
import attrs
from qevict.backends.reference import ReferenceAttention
from qevict.contracts.backend import AttentionBackend
from qevict.registry import hookimpl

class Own(AttentionBackend):
    name = "own"
    provides = ReferenceAttention.provides
    def attend(self, query, view, *, want_mass): return ReferenceAttention().attend(query, view, want_mass=want_mass)
    def mass(self, query, view): return ReferenceAttention().mass(query, view)
    def reason(self, setting): return "it suits"

class Picky(Own):
    name = "picky"
    def __init__(self, device): pass

@hookimpl
def qevict_backends(): return [Own, Picky]
"""


def test_backends_are_offered_unasked_by_plugins_that_say_so(site: Path, write: Any) -> None:
    """A plugin of the group ``qevict`` alone is left alone; what needs arguments cannot be offered."""
    write(site, "qevict-own", BACKEND)
    quiet = [EntryPoint("own", "qevict_own", "qevict")]
    assert Registry(quiet, Switches()).offered_backends() == ()
    assert "qevict_own" not in sys.modules
    registry = Registry([*quiet, EntryPoint("own", "qevict_own", "qevict.backends")], Switches())
    with pytest.warns(PluginWarning, match="Picky cannot be asked"):
        assert [each.name for each in registry.offered_backends()] == ["own"]
    assert registry.get("backend", "own") is type(registry.offered_backends()[0])


def test_an_offer_cannot_take_the_name_of_a_built_in_backend(site: Path, write: Any) -> None:
    write(site, "qevict-own", BACKEND.replace('"own"', '"flash"').replace("[Own, Picky]", "[Own]"))
    registry = Registry([EntryPoint("own", "qevict_own", "qevict.backends")], Switches())
    with pytest.warns(PluginWarning, match="the built-in keeps its name"):
        assert registry.offered_backends() == ()


def test_a_broken_offer_costs_a_warning(site: Path, write: Any) -> None:
    write(site, "qevict-own", "raise ImportError('no such library')")
    registry = Registry([EntryPoint("own", "qevict_own", "qevict.backends")], Switches())
    with pytest.warns(PluginWarning, match="no such library"):
        assert registry.offered_backends() == ()
    assert registry.offered_backends() == ()


def test_switches_hold_for_offers_as_well(site: Path, write: Any) -> None:
    write(site, "qevict-own", BACKEND)
    registry = Registry([EntryPoint("own", "qevict_own", "qevict.backends")], Switches(no_plugins=True))
    assert registry.offered_backends() == ()
