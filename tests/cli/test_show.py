"""`qevict show`: parts, windows and bytes by tier, from presets, files and models."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import attrs
import pytest
import torch
from tests import config_parts as parts
from tests.cli.conftest import Invoke

import qevict
from qevict import policies
from qevict.errors import ContractError, ModelError, PolicyError, PolicyFileError, UnknownPartError
from qevict.registry import Registry, Switches


def test_a_person_reads_parts_tiers_and_the_backend(invoke: Invoke) -> None:
    done = invoke("show", "qevict", "--tokens", "4096")
    assert done.exit_code == 0
    for words in (
        "CumulativeAttention",
        "GreedyTiers(shares=(0.3, 0.7), scope='lane')",
        "codes read in place",
        "20 % per row",
    ):
        assert words in done.stdout
    for words in ("protected", "int2", "evicted", "per_channel, 2 bits", "Llama-3.1-8B", "512 MiB"):
        assert words in done.stdout


def test_a_person_reads_when_windows_are_routed(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "once.toml"
    file.write_text(qevict.dumps(attrs.evolve(policies.evict_only("20 %"), route_at="prompt")), encoding="utf-8")
    assert "routed once, at the prompt's end" in invoke("show", str(file)).stdout
    assert "routed every 8" in invoke("show", "evict_only").stdout


def test_a_machine_reads_the_same(invoke: Invoke) -> None:
    """896 + 8288 + 7040 windows of 8 tokens, and 5 unranked ones, in each of 32 lanes cover 4096 tokens."""
    shown = json.loads(invoke("show", "qevict", "--json").stdout)
    seen = shown["forecast"]
    assert seen["full_bytes"] == 4096 * 131072
    assert seen["budget_bytes"] == seen["full_bytes"] // 5
    assert sum(seen["windows"].values()) + seen["evicted_windows"] == 32 * -(-(4096 - 5) // 8)
    assert shown["policy"]["router"] == {"name": "greedy", "shares": [0.3, 0.7], "scope": "lane"}
    assert shown["geometry"]["dtype"] == "bfloat16"


def test_toml_is_a_file_to_start_from(invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("show", "evict_only", "--toml", "--budget", "64 MiB", "--dtype", "float16")
    own = tmp_path / "own.toml"
    own.write_text(done.stdout, encoding="utf-8")
    assert qevict.load(own) == policies.evict_only("64 MiB", dtype=torch.float16)
    shown = json.loads(invoke("show", str(own), "--json", "--budget", "10 %").stdout)
    assert shown["policy"]["budget"] == "10 %"


def test_a_models_sizes_come_from_its_configuration(invoke: Invoke, chat_model: str) -> None:
    geometry = json.loads(invoke("show", "qevict", "--model", chat_model, "--json").stdout)["geometry"]
    assert geometry == {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}


def test_what_cannot_be_shown_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    for argv, kind, words in (
        (("full", "--budget", "5 %"), PolicyError, "has no budget"),
        (("qevict", "--budget", "5 cups"), PolicyError, "unknown budget unit 'cups'"),
        ((str(tmp_path / "none.toml"),), PolicyFileError, "none.toml"),
        (("qevict", "--model", str(tmp_path)), ModelError, "hub id"),
    ):
        done = invoke("show", *argv)
        assert isinstance(done.exception, kind)
        assert words in str(done.exception)
    assert invoke("show", "qevict", "--toml", "--json").exit_code == 2
    assert invoke("show", "qevict", "--dtype", "int8").exit_code == 2


@pytest.mark.parametrize("preset", ["full", "sinks_recent", "evict_only", "qevict"])
def test_every_preset_can_be_shown(invoke: Invoke, preset: str) -> None:
    assert invoke("show", preset).exit_code == 0


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin with presets is installed."""
    ours = Registry([EntryPoint("parts", "tests.config_parts", "qevict")], Switches())
    monkeypatch.setattr("qevict.registry.default_registry", lambda: ours)
    monkeypatch.setattr("qevict.config.files.default_registry", lambda: ours)


@pytest.mark.usefixtures("plugin")
def test_a_preset_of_a_plugin_can_be_shown(invoke: Invoke, tmp_path: Path) -> None:
    """Also with options that it does not take itself."""
    done = invoke("show", "by_table", "--toml", "--budget", "64 MiB", "--dtype", "float16")
    own = tmp_path / "own.toml"
    own.write_text(done.stdout, encoding="utf-8")
    assert qevict.load(own) == attrs.evolve(parts.by_table("64 MiB"), dtype=torch.float16)
    assert json.loads(invoke("show", "composed", "--json").stdout)["policy"]["budget"] == "20 %"


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("preset", "kind", "words"),
    [
        ("composd", UnknownPartError, "did you mean 'composed'"),
        ("needs_depth", PolicyError, "preset 'needs_depth' also needs depth: say so in a TOML file"),
        ("no_policy", ContractError, "preset 'no_policy' returns a Policy, got 3"),
    ],
)
def test_a_preset_of_a_plugin_that_cannot_be_shown(
    invoke: Invoke, preset: str, kind: type[Exception], words: str
) -> None:
    done = invoke("show", preset)
    assert isinstance(done.exception, kind)
    assert words in str(done.exception)


def test_a_file_need_not_end_in_toml(invoke: Invoke, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text('schema = 1\npreset = "full"\n', encoding="utf-8")
    assert invoke("show", str(own)).exit_code == 0
