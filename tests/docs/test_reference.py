"""The reference is complete: what can be used stands in it, and what it links to is there."""

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import click
import pytest
import typer.main
from tests.oracle import prompts, tiny

import qevict
from qevict import errors
from qevict.cli import app
from qevict.registry import Registry, hookspecs
from qevict.registry.kinds import CONTRACTS, KINDS, hook_name
from qevict.registry.switches import DISABLE, TRACE

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
ERRORS = [each for _, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__]


def read(name: str) -> str:
    return (REFERENCE / name).read_text("utf-8")


@pytest.mark.parametrize("hook", [hook_name(kind) for kind in KINDS])
def test_every_hook_stands_there_with_its_signature(hook: str) -> None:
    signature = re.sub(r"(?:\w+\.)+", "", str(inspect.signature(getattr(hookspecs, hook))))
    assert f"| `{hook}{signature}` |" in read("hooks.md")


def test_no_hook_is_missing() -> None:
    specified = {name for name in vars(hookspecs) if name.startswith("qevict_")}
    assert specified == set(map(hook_name, KINDS))


@pytest.mark.parametrize("error", ERRORS, ids=lambda each: str(each.__name__))
def test_every_error_is_documented(error: type) -> None:
    """One directive documents the module, and what has a docstring of its own is on the page."""
    assert re.search(r"^::: qevict\.errors$", read("errors.md"), re.MULTILINE)
    assert "__doc__" in vars(error)
    assert error.__doc__


def commands(command: click.Command, words: tuple[str, ...] = ("qevict",)) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with the words that call it."""
    children: Mapping[str, click.Command] = getattr(command, "commands", {})
    if not children:
        yield " ".join(words), command
    for name, child in children.items():
        yield from commands(child, (*words, name))


COMMANDS = dict(commands(cast("click.Command", typer.main.get_command(app))))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_documented(name: str) -> None:
    page = read("cli.md")
    assert f"| `{name}` |" in page
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `(--[a-z-]+)` \|", section, re.MULTILINE))
    options = {option for each in COMMANDS[name].params for option in each.opts if option.startswith("--")}
    assert documented == options - {"--help"}


@pytest.mark.parametrize("word", [DISABLE, TRACE, "| 0 |", "| 1 |", "| 2 |", "--version"])
def test_exit_codes_and_switches_are_documented(word: str) -> None:
    assert word in read("cli.md")


def test_every_built_in_part_is_listed() -> None:
    page, offers = read("parts.md"), Registry(entry_points=()).inventory().parts
    parts = [each for each in offers if each.kind in CONTRACTS]
    assert len(parts) == len(re.findall(rf"^\| `\w+` \| (?:{'|'.join(CONTRACTS)}) \|", page, re.MULTILINE))
    for each in parts:
        assert f"| `{each.name}` | {each.kind} | `{each.part.__name__}` |" in page
        assert f"::: {each.part.__module__}.{each.part.__name__}\n" in page


def test_every_kind_of_bytes_is_explained() -> None:
    model = tiny("llama")
    with qevict.attach(model, qevict.policies.qevict("40 %")) as session:
        kinds = session.prefill(prompts(100)[0]).report().bytes_by_kind
    assert set(kinds) == set(re.findall(r"^\| `([a-z ]+)` \|", read("report.md"), re.MULTILINE))


def test_both_readmes_link_to_each_other() -> None:
    for own, other in (READMES, READMES[::-1]):
        assert f"]({other.name})" in own.read_text("utf-8").partition("\n## ")[0]


def test_both_readmes_have_the_same_sections_code_and_figures() -> None:
    """Comments may differ."""
    one, other = (each.read_text("utf-8") for each in READMES)
    assert one.count("\n## ") == other.count("\n## ")
    assert code_of(one) == code_of(other)
    assert figures_of(one) == figures_of(other)


def code_of(text: str) -> list[str]:
    blocks = re.findall(r"^```(python|toml|text)[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [ast.dump(ast.parse(block)) if language == "python" else block for language, block in blocks]


def figures_of(text: str) -> list[str]:
    rows = "\n".join(re.findall(r"^\|.*", text, re.MULTILINE))
    return re.findall(r"\d+(?:\.\d+)?", rows)


@pytest.mark.parametrize("page", [*READMES, ROOT / "CONTRIBUTING.md"], ids=lambda each: str(each.name))
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text("utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []


def shown(figure: dict[str, float]) -> set[str]:
    nats, shares = ("nats", "sentence_nats"), ("exact_share", "paper_share")
    return {f"{figure[key]:.2f}" for key in nats} | {f"{100 * figure[key]:.1f} %" for key in shares}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "figures.md"], ids=lambda page: str(page.name))
def test_figures_are_those_of_the_record(page: Path) -> None:
    """Every number of a row that names a measured policy, in the section or on the page of figures."""
    figures = json.loads((ROOT / "benchmarks" / "results" / "needle.json").read_text("utf-8"))["figures"]
    figures["full cache"] = figures["full"]
    text, rows = page.read_text("utf-8").rpartition("# Figures\n")[2].partition("\n## Bytes")[0], 0
    for line in re.findall(r"^\| (.+) \|$", text, re.MULTILINE):
        name, *cells = (cell.strip() for cell in line.split("|"))
        own = [figures[each] for each in (name, f"{name}, 20 %", f"{name}, 10 %") if each in figures]
        if own:
            assert set(cells[:4]) <= set().union(*map(shown, own), {""}), name
            rows += 1
        if own and len(cells) > 4 and cells[5]:
            difference = own[0]["difference"]
            assert cells[5] == "{mean:+.2f} ({low:+.2f} to {high:+.2f})".format(**difference), name
    assert rows >= 8


SPEED = {
    "figures.md": ["decode-4096-float32"],
    "fused.md": [
        "decode-16384-float32",
        "decode-4096-bfloat16",
        "decode-16384-bfloat16",
        *(f"llama-{size}/decode-{tokens}-float32" for size in ("1b", "8b") for tokens in (4096, 16384)),
    ],
}


@pytest.mark.parametrize(("page", "name"), [(page, name) for page, names in SPEED.items() for name in names])
def test_speed_figures_are_those_of_the_record(page: str, name: str) -> None:
    """Every row of a decode benchmark, as it was recorded; pages other than that of figures leave slower ways out."""
    record = recorded(name)
    text = (ROOT / "docs" / page).read_text("utf-8")
    for contestant, row in record["rows"].items():
        told = f"{spread(row)} | {row['tokens_attended'][0]:.0f}"
        share = 100 * row["exact_bytes"] / row["full_bytes"]
        if page == "figures.md" or re.fullmatch(r"packed SDPA|QEvict 20 %, stored [a-z0-9]+", contestant):
            assert f"| {contestant} | {told} | {share:.1f} % | {row['backend']} |" in text
    if page == "figures.md":
        assert record["command"] in text


def test_figures_of_the_operator_are_those_of_the_records() -> None:
    records = [recorded(f"operator-{tokens}-float32")["rows"] for tokens in (64, 4096, 16384)]
    text = (ROOT / "docs/fused.md").read_text("utf-8")
    for name in records[0]:
        assert f"| {name} | {' | '.join(spread(rows[name]) for rows in records)} |" in text


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text("utf-8"))
    return found


def spread(row: dict[str, Any]) -> str:
    time = row["time"]
    return f"{time['ratio']:.2f} ({time['low']:.2f} to {time['high']:.2f})"
