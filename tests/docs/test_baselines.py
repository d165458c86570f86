"""The page of the baselines says what the presets are, and the docstrings what they hold."""

import inspect
import json
import re
import runpy
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from qevict.contracts.scorer import Scorer
from qevict.contracts.values import Geometry
from qevict.engine.wiring import Wiring
from qevict.policy import Policy
from qevict_baselines import plugin
from qevict_baselines.kvquant_calibration import Calibration

ROOT = Path(__file__).parents[2]
FOLDER = tempfile.TemporaryDirectory()
CALIBRATED = str(Path(FOLDER.name) / "calibration.safetensors")
Calibration(
    torch.zeros(32, 8, 64) - 1,
    torch.ones(32, 8, 64),
    torch.linspace(-1, 1, 8).repeat(32, 1),
    torch.linspace(-1, 1, 8).repeat(32, 1),
    3,
).save(CALIBRATED)
GEOMETRY = Geometry(layers=32, q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
EVERY = {preset.__name__: preset for preset in plugin.qevict_presets()}
PRESETS = {name: preset for name, preset in EVERY.items() if "budget" in inspect.signature(preset).parameters}
QUANTISING = {name: preset for name, preset in EVERY.items() if name not in PRESETS}
PARTS = [*plugin.qevict_scorers(), *plugin.qevict_routers(), *plugin.qevict_quantizers()]
LANES = {"row": "rows", "kv_head": "KV heads"}


@cache
def page(name: str = "reference/baselines.md") -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def words(part: object) -> str:
    return " ".join((inspect.getdoc(part) or "").split())


def papers(text: str) -> set[str]:
    return set(re.findall(r"\b\d{4}\.\d{5}\b", text))


def bookkeeping(policy: Policy) -> int:
    """Bytes of a window in full precision beside its keys and values: its record, and a flag for each token."""
    wiring = Wiring(policy, GEOMETRY, rotary=None)
    return wiring.record_bytes + wiring.slot_bytes[0] - wiring.block_bytes[0]


def protected(policy: Policy) -> str:
    first = [f"first {policy.sink_tokens}"] if policy.sink_tokens else []
    last = [f"last {policy.protected_tokens}"] if policy.protected_tokens else []
    return ", ".join(first + last) or "nothing"


def times(policy: Policy) -> str:
    every = "every token" if policy.period_tokens == 1 else f"every {policy.period_tokens} tokens"
    return "once" if policy.route_at == "prompt" else every


def cells(policy: Policy) -> list[str]:
    """What a row of the table says, behind the name."""
    own = [LANES[policy.granularity], policy.router.scope, str(bookkeeping(policy))]
    return own if policy.window_tokens > 1 else [times(policy), protected(policy), *own]


@pytest.mark.parametrize("name", PRESETS)
def test_the_row_of_a_preset_is_what_it_is(name: str) -> None:
    assert f"| `{name}` | {' | '.join(cells(PRESETS[name]('20 %')))} |" in page()


def test_no_other_preset_has_a_row() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", page(), re.MULTILINE)) == sorted(EVERY)


def quantising(name: str) -> Policy:
    return QUANTISING[name](CALIBRATED) if name == "kvquant" else QUANTISING[name]()


def code_bytes(policy: Policy) -> list[int]:
    """Bytes of a token of a KV head of 64 channels, by tier."""
    wiring = Wiring(policy, attrs.evolve(GEOMETRY, head_dim=64), rotary=None)
    tokens = wiring.heads * policy.window_tokens
    assert all(block % tokens == 0 for block in wiring.block_bytes[1:])
    return [block // tokens for block in wiring.block_bytes[1:]]


@pytest.mark.parametrize("name", QUANTISING)
def test_the_row_of_a_quantising_preset_is_what_it_is(name: str) -> None:
    policy = quantising(name)
    wiring = Wiring(policy, attrs.evolve(GEOMETRY, head_dim=64), rotary=None)
    stored = " / ".join(map(str, code_bytes(policy)))
    own = [
        times(policy),
        protected(policy),
        str(policy.window_tokens),
        stored,
        str(wiring.shared_bytes // wiring.heads),
    ]
    assert f"| `{name}` | {' | '.join(own)} |" in page()


@pytest.mark.parametrize("name", QUANTISING)
def test_the_docstring_of_a_quantising_preset_counts_its_bytes(name: str) -> None:
    [counted] = re.findall(r"KV head of 64 channels: (\d+)", words(QUANTISING[name]))
    assert int(counted) in code_bytes(quantising(name))


@pytest.mark.parametrize("name", PRESETS)
def test_the_docstring_of_a_preset_counts_its_bookkeeping(name: str) -> None:
    [counted] = re.findall(r"(\d+) of bookkeeping", words(PRESETS[name]))
    assert int(counted) == bookkeeping(PRESETS[name]("20 %"))


@pytest.mark.parametrize("scorer", plugin.qevict_scorers(), ids=lambda each: str(each.name))
def test_the_docstring_of_a_scorer_counts_its_state(scorer: type[Scorer]) -> None:
    """A scorer over another states its own; one without a state says 0 bytes."""
    part, text = scorer(), words(scorer)
    [counted] = re.findall(r"Bytes: (\d+) per window and lane|(\d+) bytes", text)
    base = getattr(part, "base", None)
    assert int("".join(counted)) == state_bytes(part) - (state_bytes(base) if base else 0)


def state_bytes(part: Scorer) -> int:
    return sum(column.nbytes for column in part.start(1, 1, torch.device("cpu")).values())


@pytest.mark.parametrize("name", EVERY)
def test_a_row_names_the_paper_of_the_docstring(name: str) -> None:
    [row] = re.findall(rf"^\| `{name}` \|.*$", page(), re.MULTILINE)
    module = words(inspect.getmodule(EVERY[name]))
    assert papers(row) <= papers(words(EVERY[name]) + module)
    assert papers(row) or not papers(words(EVERY[name]))


@pytest.mark.parametrize("offered", [*EVERY.values(), *PARTS], ids=lambda each: str(each.__name__))
def test_everything_offered_is_on_the_page(offered: Callable[..., object]) -> None:
    assert re.search(rf"^::: {re.escape(offered.__module__)}$", page(), re.MULTILINE)


SCRIPT = runpy.run_path(str(ROOT / "tools" / "count_lines.py"))


def test_the_lines_of_each_file_are_counted() -> None:
    """The table in the guide is what the script prints."""
    counted = SCRIPT["table"](ROOT / "baselines/src/qevict_baselines")
    assert counted in page("how-to/add-a-baseline.md"), "renew it: tools/count_lines.py says how"


def test_the_smallest_baselines_have_as_many_lines_as_it_says() -> None:
    code_lines, guide = SCRIPT["code_lines"], page("how-to/add-a-baseline.md")
    [example] = re.findall(r'^```python title="long_values.py"\n(.*?)^```$', guide, re.DOTALL | re.MULTILINE)
    template = (ROOT / "baselines/src/qevict_baselines/keynorm.py").read_text("utf-8")
    assert f"a whole method in {code_lines(template)} lines of code" in guide
    assert f"Those are {code_lines(example)} lines of code" in guide


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings() -> None:
    source = '"""Told\n\nat length."""\n\nimport os  # said\n\n# said\nX = """not\ntold"""\n"""Told."""\n'
    assert SCRIPT["code_lines"](source) == 3


def test_the_script_renews_the_table_of_a_page(tmp_path: Path) -> None:
    guide = tmp_path / "guide.md"
    guide.write_text("| file | lines |\n|---|---|\n| `a.py` | 1 |\n| `b.py` | 2 |\n\nEnd.\n", "utf-8")
    SCRIPT["renew"](guide, "| `c.py` | 3 |\n")
    assert guide.read_text("utf-8") == "| file | lines |\n|---|---|\n| `c.py` | 3 |\n\nEnd.\n"
    guide.write_text("No table.\n", "utf-8")
    with pytest.raises(SystemExit, match=r"has 0 tables of lines; it needs one"):
        SCRIPT["renew"](guide, "")


def test_figures_of_the_scorers_are_those_of_the_record() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "scorers.json").read_text("utf-8"))
    facts, texts = (record[what]["figures"] for what in ("facts", "continuation"))
    shown = page("how-to/compose-baselines.md")
    assert f"$ {record['command']}" in shown
    for name, own in facts.items():
        cells = [f"{each['nats']:.2f} | {difference(each)}".rstrip() for each in (own, texts[name])]
        assert f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |") in shown.replace("|  |", "| |"), name


def difference(row: dict[str, Any]) -> str:
    found = row["difference"]
    return "" if found is None else f"{found['mean']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f})"
