"""C22: whatever is wrong with an installed plugin, the host lives, says so, and keeps its output clean."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qevict.errors

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
Listing = dict[str, list[dict[str, Any]]]

SOURCE = Path(qevict.errors.__file__).parents[1]
CLI = ("-m", "qevict.cli")

ROUTER = """
from qevict.registry import hookimpl
from qevict.routers.greedy import GreedyTiers
class Strayed(GreedyTiers):
    name = "wrong_kind"
@hookimpl
def qevict_scorers(): return [Strayed]
"""

# What is wrong -> code of the module, and what must be said about it.
BROKEN = {
    "import-error": ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    "syntax-error": ("def (", "SyntaxError"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "exits-in-hook": ("@HOOK\ndef qevict_scorers(): exit(3)", "SystemExit: 3"),
    "brackets": ("raise ValueError('[/red] [bold')", "ValueError: [/red] [bold"),
    "lines": ("raise ValueError('first\\n  second')", "ValueError: first second"),
    "mute": ("class E(Exception):\n    def __str__(self): raise E\nraise E", "E"),
    "missing": (None, "No module named 'qevict_missing'"),
    "hookless": ("", "implements no hook"),
    "misspelt": ("@HOOK\ndef qevict_scorer(): return []", "unknown hook 'qevict_scorer'"),
    "greedy-hook": ("@HOOK\ndef qevict_scorers(model): return []", "'model'"),
    "forgot-return": ("@HOOK\ndef qevict_scorers(): pass", "returns an iterable of classes, got None"),
    "answer": ("ANSWER = 42", "42 implements no hook"),
    "number": ("@HOOK\ndef qevict_scorers(): return 42", "returns an iterable of classes, got 42"),
    "numbers": ("@HOOK\ndef qevict_scorers(): return [42]", "qevict_scorers returns classes, got 42"),
    "foreign": ("@HOOK\ndef qevict_scorers(): return [dict]", "derive it from qevict.contracts.scorer.Scorer"),
    "wrong-kind": (ROUTER, "offer it from qevict_routers"),
    "abstract": ("SCORER.replace('def rank', 'def rang')", "is abstract; implement rank"),
    "instance": ("SCORER.replace('[Part]', '[Part()]')", "return the class itself"),
    "nameless": ("SCORER.replace('\"nameless\"', '\"\"')", "has name ''"),
    "signature": ("SCORER.replace('rank(self, state, windows)', 'rank(self, state)')", "too many positional"),
}
POINTS_AT = {"answer": "qevict_answer:ANSWER"}
HOOK = ("@HOOK", "from qevict.registry import hookimpl\n@hookimpl")


def module_of(wrong: str, scorer_code: Callable[[str], str]) -> str | None:
    code = BROKEN[wrong][0]
    if code is None or not code.startswith("SCORER"):
        return code and code.replace(*HOOK)
    changed = eval(code, {"SCORER": scorer_code(wrong)})  # noqa: S307 - the table above
    assert changed != scorer_code(wrong)
    return str(changed)


@pytest.fixture(scope="module")
def crowd(
    tmp_path_factory: pytest.TempPathFactory, write: Callable[..., None], scorer_code: Callable[[str], str]
) -> Path:
    """A path with every broken plugin, two that clash, and one that works but talks."""
    site = tmp_path_factory.mktemp("site")
    for wrong in BROKEN:
        write(site, f"qevict-{wrong}", module_of(wrong, scorer_code), value=POINTS_AT.get(wrong))
    write(site, "qevict-one", scorer_code("twin"))
    write(site, "qevict-two", scorer_code("twin"))
    write(site, "qevict-talks", "print('chatter')\n" + scorer_code("talks"))
    return site


@pytest.fixture(scope="module")
def run(crowd: Path) -> Run:
    def run(*argv: str) -> Done:
        path = [str(crowd), str(SOURCE)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("QEVICT_")}
        environment = {**kept, "PYTHONPATH": os.pathsep.join(path), "PYTHONWARNINGS": "default"}
        return subprocess.run(
            [sys.executable, *argv], env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.fixture(scope="module")
def listed(run: Run) -> Done:
    return run(*CLI, "plugins", "--json")


@pytest.fixture(scope="module")
def listing(listed: Done) -> Listing:
    assert listed.returncode == 0, listed.stderr
    loaded: Listing = json.loads(listed.stdout)
    return loaded


@pytest.fixture(scope="module")
def asked(run: Run) -> dict[str, list[str]]:
    """In one process: a built-in, then each plugin by name; the type and the message of what is raised."""
    code = f"""
import json, sys, warnings
from qevict.registry import default_registry
with warnings.catch_warnings(record=True) as warned:
    default_registry().get("scorer", "recency")
    before = [name for name in sys.modules if name.startswith("qevict_")] + warned
    raised = {{}}
    for name in {[*BROKEN, "twin", "talks"]}:
        try: default_registry().get("scorer", name)
        except Exception as error: raised[name] = [type(error).__name__, str(error)]
print(json.dumps({{**raised, "before": before, "warned": [str(each.message) for each in warned]}}))
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, list[str]] = json.loads(done.stdout)
    return loaded


@pytest.mark.parametrize("wrong", BROKEN)
def test_the_listing_shows_what_failed_whose_it_is_and_why(listing: Listing, wrong: str) -> None:
    [failure] = [each for each in listing["failures"] if each["entry_point"] == wrong]

    assert (failure["distribution"], failure["version"]) == (f"qevict-{wrong}", "1.0")
    assert BROKEN[wrong][1] in failure["cause"]


def test_a_clash_is_shown_with_both_distributions(listing: Listing) -> None:
    clashing = [each for each in listing["failures"] if each["name"] == "twin"]
    assert {each["distribution"] for each in clashing} == {"qevict-one", "qevict-two"}
    assert all("qevict-one 1.0" in each["cause"] and "qevict-two 1.0" in each["cause"] for each in clashing)


def test_everything_that_works_is_listed(listing: Listing) -> None:
    names = {(each["kind"], each["name"]) for each in listing["parts"]}
    assert names >= {("scorer", "recency"), ("router", "greedy"), ("scorer", "talks")}
    assert not names & {("scorer", wrong) for wrong in [*BROKEN, "twin"]}


def test_a_talking_plugin_talks_to_stderr(listed: Done) -> None:
    assert "chatter" not in listed.stdout
    assert "chatter" in listed.stderr


@pytest.mark.parametrize("wrong", BROKEN)
def test_asking_for_a_broken_plugin_names_distribution_and_entry_point(asked: dict[str, list[str]], wrong: str) -> None:
    kind, message = asked[wrong]
    assert kind == "PluginError"
    assert f"plugin qevict-{wrong} 1.0 (entry point '{wrong}') failed" in message


def test_asking_for_a_clashing_name_is_an_error_of_its_own(asked: dict[str, list[str]]) -> None:
    assert asked["twin"][0] == "DuplicatePartError"
    assert "talks" not in asked


def test_built_ins_are_served_before_any_plugin_is_touched(asked: dict[str, list[str]]) -> None:
    assert asked["before"] == []


def test_each_failure_warns_once(asked: dict[str, list[str]]) -> None:
    warned = " ".join(asked["warned"])
    assert all(warned.count(f"(entry point '{wrong}') failed") == 1 for wrong in BROKEN)


def test_asking_for_a_broken_plugin_ends_a_script_with_an_error(run: Run) -> None:
    done = run("-c", "from qevict.registry import default_registry as r; r().get('scorer', 'exits')")

    assert done.returncode == 1
    assert "PluginError: scorer 'exits' cannot be had" in done.stderr
    assert not done.stdout


def test_help_does_not_notice_plugins(run: Run) -> None:
    done = run(*CLI, "--help")
    assert done.returncode == 0
    assert "Usage: qevict" in done.stdout
    assert "chatter" not in done.stdout
    assert not done.stderr


def test_the_table_shows_parts_and_failures(run: Run) -> None:
    done = run(*CLI, "plugins")
    assert done.returncode == 0, done.stderr
    assert "failed plugin qevict-brackets 1.0 (entry point 'brackets') failed: ValueError: [/red] [bold" in done.stdout
    assert [word for word in done.stdout.split() if word == "talks"]


def test_generate_with_built_ins_does_not_notice_plugins(run: Run) -> None:
    code = """
import torch, qevict
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
with qevict.attach(model, qevict.policies.qevict("40 %")) as session:
    print(session.generate(torch.randint(3, 97, (1, 90)), max_new_tokens=9, min_new_tokens=9).shape[1])
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["99"]
    assert "chatter" not in done.stderr
