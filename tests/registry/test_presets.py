"""A preset is a function of a name, whose arguments go by name, and that returns a policy."""

import functools
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from qevict import policies
from qevict.contracts.budget import Budget
from qevict.errors import ContractError, DuplicatePartError, PluginError, UnknownPartError
from qevict.policies import PRESETS
from qevict.policy import Policy
from qevict.registry import PluginWarning, Registry, Switches
from qevict.registry.presets import checked_preset, policy_of
from qevict.routers.greedy import GreedyTiers

Write = Callable[..., None]
EntryPoints = Callable[[], tuple[EntryPoint, ...]]

CODE = """
from qevict.policies import evict_only
from qevict.registry import hookimpl

def {name}(budget, *, sink_tokens=3):
    return evict_only(budget, sink_tokens=sink_tokens)

@hookimpl
def qevict_presets(): return [{name}]
"""


def registry(entry_points: EntryPoints) -> Registry:
    return Registry(entry_points(), Switches())


def mine(budget: Budget | str, *, sink_tokens: int = 3) -> Policy:
    return policies.evict_only(budget, sink_tokens=sink_tokens)


def takes_any(budget: str, *more: str) -> Policy:
    return mine(budget)


def takes_every(budget: str, **more: str) -> Policy:
    return mine(budget)


def by_place(budget: str, /) -> Policy:
    return mine(budget)


def of_files(budget: str, schema: int = 1) -> Policy:
    return mine(budget)


def three() -> Any:
    return 3


def names(preset: str) -> Policy:
    return mine("20 %")


@pytest.mark.parametrize("name", PRESETS)
def test_built_in_presets_come_through_the_hook(name: str) -> None:
    assert Registry(entry_points=()).get("preset", name) is PRESETS[name]


def test_a_preset_is_found_by_the_name_of_its_function(site: Path, write: Write, entry_points: EntryPoints) -> None:
    write(site, "qevict-zoo", CODE.format(name="mammoth"))
    ours = registry(entry_points)

    assert policy_of(ours.get("preset", "mammoth"), budget="30 %") == mine("30 %")
    [offer] = [each for each in ours.inventory().parts if each.name == "mammoth"]
    assert (offer.kind, offer.source.distribution) == ("preset", "qevict-zoo")
    assert str(offer).endswith("qevict_zoo.mammoth")


def test_a_miss_says_what_was_meant(site: Path, write: Write, entry_points: EntryPoints) -> None:
    write(site, "qevict-zoo", CODE.format(name="mammoth"))
    ours = registry(entry_points)

    with pytest.raises(
        UnknownPartError, match=r"(?s)no preset is named 'mamoth'.*'mammoth'\?.*known: evict_only, four_tiers, full"
    ):
        ours.get("preset", "mamoth")
    with pytest.raises(UnknownPartError, match="'mammoth' is a preset"):
        ours.get("scorer", "mammoth")


def test_two_presets_of_a_name_are_an_error_that_names_both_distributions(
    site: Path, write: Write, entry_points: EntryPoints
) -> None:
    for name in ("qevict-one", "qevict-two"):
        write(site, name, CODE.format(name="twin"))

    with pytest.warns(PluginWarning), pytest.raises(DuplicatePartError, match=r"'twin'.*qevict-one.*qevict-two"):
        registry(entry_points).get("preset", "twin")


def test_a_preset_that_was_refused_is_recognised_by_its_name(
    site: Path, write: Write, entry_points: EntryPoints
) -> None:
    write(
        site,
        "qevict-half",
        CODE.format(name="half_done").replace("*, sink_tokens=3", "**options").replace("=sink_tokens", "=2"),
    )

    with (
        pytest.warns(PluginWarning),
        pytest.raises(PluginError, match=r"(?s)'half_done' cannot.*qevict-half 1.0.*\*\*opt"),
    ):
        registry(entry_points).get("preset", "half_done")


def test_a_scorer_s_hook_points_to_that_of_presets(site: Path, write: Write, entry_points: EntryPoints) -> None:
    write(site, "qevict-zoo", CODE.format(name="mammoth").replace("qevict_presets", "qevict_scorers"))
    ours = registry(entry_points)

    with pytest.warns(PluginWarning, match="qevict_scorers returns classes, got .*presets go through qevict_presets"):
        ours.inventory()


def test_what_is_no_list_is_refused(site: Path, write: Write, entry_points: EntryPoints) -> None:
    write(site, "qevict-zoo", CODE.format(name="mammoth").replace("[mammoth]", "mammoth"))

    with pytest.warns(PluginWarning, match="qevict_presets returns an iterable of functions, got <function mammoth"):
        registry(entry_points).inventory()


def test_a_preset_passes() -> None:
    assert checked_preset(mine) is mine


@pytest.mark.parametrize(
    ("offered", "message"),
    [
        (42, "qevict_presets returns functions, got 42; write it with def"),
        (mine("20 %"), "return the function itself, not what it returns"),
        (GreedyTiers, "offer it from qevict_routers"),
        (functools.partial(mine, sink_tokens=2), "write it with def"),
        (lambda: mine("20 %"), "<lambda> has no name to know a preset by"),
        (takes_any, r"takes_any takes \*more: str; files give arguments by name"),
        (takes_every, r"takes_every takes \*\*more: str; files give arguments by name"),
        (by_place, "by_place takes budget: str; files give arguments by name"),
        (of_files, "of_files takes 'schema', which in files means something else"),
        (names, "names takes 'preset', which in files means something else"),
    ],
    ids=["number", "called", "class", "partial", "lambda", "args", "kwargs", "place", "schema", "preset"],
)
def test_what_cannot_be_a_preset_is_refused(offered: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        checked_preset(offered)


def test_a_preset_that_returns_something_else_is_told_when_it_is_called() -> None:
    with pytest.raises(ContractError, match="preset 'three' returns a Policy, got 3"):
        policy_of(three)
