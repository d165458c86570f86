"""`qevict show`: parts, windows and bytes by tier, from presets, files and models."""

import json
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Invoke

import qevict
from qevict import policies
from qevict.errors import ModelError, PolicyError, PolicyFileError


def test_a_person_reads_parts_tiers_and_the_backend(invoke: Invoke) -> None:
    done = invoke("show", "qevict", "--tokens", "4096")
    assert done.exit_code == 0
    for words in ("CumulativeAttention", "GreedyTiers(shares=(0.3, 0.7))", "codes read in place", "20 % per row"):
        assert words in done.stdout
    for words in ("protected", "int2", "evicted", "per_channel, 2 bits", "Llama-3.1-8B", "512 MiB"):
        assert words in done.stdout


def test_a_machine_reads_the_same(invoke: Invoke) -> None:
    """896 + 8288 + 7040 windows of 8 tokens, and 5 unranked ones, in each of 32 lanes cover 4096 tokens."""
    shown = json.loads(invoke("show", "qevict", "--json").stdout)
    seen = shown["forecast"]
    assert seen["full_bytes"] == 4096 * 131072
    assert seen["budget_bytes"] == seen["full_bytes"] // 5
    assert sum(seen["windows"].values()) + seen["evicted_windows"] == 32 * -(-(4096 - 5) // 8)
    assert shown["policy"]["router"] == {"name": "greedy", "shares": [0.3, 0.7]}
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
