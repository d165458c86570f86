"""What a newcomer copies works: the distribution in ``plugins/_template`` is found, and its laws hold."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import qevict.errors

SOURCE = Path(qevict.errors.__file__).parents[1]
TEMPLATE = Path(__file__).parents[2] / "plugins" / "_template"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    content = tomllib.loads((TEMPLATE / "pyproject.toml").read_text("utf-8"))
    project: dict[str, Any] = content["project"]
    return project


@pytest.fixture(scope="module")
def environment(project: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """As if the template were installed: metadata as an installer writes it, and its source on the path."""
    site = tmp_path_factory.mktemp("site")
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head, "utf-8")
    entries = "".join(f"{name} = {value}\n" for name, value in project["entry-points"]["qevict"].items())
    (info / "entry_points.txt").write_text(f"[qevict]\n{entries}", "utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QEVICT_")}
    path = os.pathsep.join(map(str, (site, TEMPLATE / "src", SOURCE)))
    return {**kept, "PYTHONPATH": path, "PYTHONWARNINGS": "error"}


def run(argv: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *argv], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_scorer_of_the_template_runs_in_generate(environment: dict[str, str]) -> None:
    code = """
import attrs, torch, qevict
from qevict.registry import default_registry
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
scorer = default_registry().get("scorer", "key_norm")()
policy = attrs.evolve(qevict.policies.evict_only("40 %"), scorer=scorer)
with qevict.attach(model, policy) as session:
    cache = session.prefill(torch.randint(3, 97, (1, 200)))
    session.generate(torch.randint(3, 97, (1, 5)), cache=cache, max_new_tokens=20, do_sample=False)
print(cache.report().evictions > 0, cache.policy.scorer.name)
"""
    assert run(["-W", "default", "-c", code], environment).split() == ["True", "key_norm"]


def test_the_registry_returns_the_class_of_the_template(environment: dict[str, str]) -> None:
    code = """
from qevict.contracts.scorer import Scorer
from qevict.registry import default_registry
found = default_registry().get("scorer", "key_norm")
assert issubclass(found, Scorer) and found() == found()
print(found.__module__, found.__name__)
"""
    assert run(["-c", code], environment).split() == ["qevict_template", "KeyNorm"]


def test_the_listing_names_the_distribution(environment: dict[str, str], project: dict[str, Any]) -> None:
    listing = json.loads(run(["-m", "qevict.cli", "plugins", "--json"], environment))

    [part] = [each for each in listing["parts"] if each["name"] == "key_norm"]
    assert (part["kind"], part["distribution"], part["version"]) == ("scorer", project["name"], project["version"])
    assert listing["failures"] == []


def test_the_contract_test_of_the_template_passes(environment: dict[str, str]) -> None:
    # Its own folder is the root, as in a copy of it elsewhere.
    argv = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(TEMPLATE), "-c", os.devnull]
    assert "passed" in run([*argv, str(TEMPLATE / "tests")], {**environment, "PYTHONWARNINGS": "default"})
