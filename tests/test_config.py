"""A file says what a policy is; all that is wrong with it is told at once, each with its path."""

import itertools
import pickle
import typing
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qevict
from qevict.backends.reference import ReferenceAttention
from qevict.config import dumps, load, loads
from qevict.config.grammar import form_of
from qevict.contracts.budget import Bytes, Fraction, Tokens
from qevict.contracts.scorer import Scorer
from qevict.errors import PolicyError, PolicyFileError, Problem
from qevict.ledgers.migration_stable import MigrationStable
from qevict.policies import PRESETS, evict_only
from qevict.policy import Policy, Tier
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.registry import Registry, Switches
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.cumulative import CumulativeAttention
from qevict.scorers.recency import Recency
from qevict.stores.memory import DeviceMemory
from qevict_template import KeyNorm
from tests import config_parts as parts

BUILT_INS = Registry(entry_points=(), switches=Switches())
PLUGINS = Registry(
    [EntryPoint("template", "qevict_template", "qevict"), EntryPoint("parts", "tests.config_parts", "qevict")],
    Switches(),
)

WHOLE = """
schema = 1
budget = "20 %"
window_tokens = 16
period_tokens = 4
sink_tokens = 3
recent_tokens = 64
granularity = "kv_head"
dtype = "bfloat16"
accounting = "paper"
min_tokens = 10
strict = true
ledger = "migration_stable"

[scorer]
name = "cumulative"
prompt_queries = 32

[router]
name = "greedy"
shares = [0.3, 0.7]

[backend]
name = "reference"

[[tiers]]
name = "full"
store = { name = "device" }

[[tiers]]
name = "int2"
keys = { name = "per_channel", bits = 2 }
values = { name = "per_token", bits = 4, parameters = "float32" }
store = "device"
"""

SHORT = """
schema = 1
scorer = "recency"
router = "greedy"
ledger = "migration_stable"
backend = "reference"
tiers = [{ name = "full", store = "device" }]
"""


def problems(text: str, registry: Registry = BUILT_INS) -> dict[str, str]:
    with pytest.raises(PolicyFileError) as caught:
        loads(text, registry=registry)
    told = {problem.path: problem.message for problem in caught.value.problems}
    assert len(told) == len(caught.value.problems), "a path has two problems"
    return told


def problem(text: str, registry: Registry = BUILT_INS) -> str:
    [(path, message)] = problems(text, registry).items()
    return f"{path}: {message}"


def scorer(options: str) -> str:
    return SHORT.replace('"recency"', f"{{ {options} }}")


def using(part: Scorer) -> Policy:
    return attrs.evolve(evict_only("20 %"), scorer=part)


def unwritten(policy: Policy, registry: Registry = BUILT_INS) -> str:
    with pytest.raises(PolicyFileError) as caught:
        dumps(policy, registry=registry)
    return "\n".join(map(str, caught.value.problems))


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────


def test_a_whole_policy() -> None:
    store = DeviceMemory()
    assert loads(WHOLE, registry=BUILT_INS) == Policy(
        scorer=CumulativeAttention(prompt_queries=32),
        router=GreedyTiers((0.3, 0.7)),
        tiers=(Tier("full", store=store), Tier("int2", PerChannel(2), PerToken(4, torch.float32), store=store)),
        ledger=MigrationStable(),
        backend=ReferenceAttention(),
        budget=Fraction(0.2),
        window_tokens=16,
        period_tokens=4,
        sink_tokens=3,
        recent_tokens=64,
        granularity="kv_head",
        dtype=torch.bfloat16,
        accounting="paper",
        min_tokens=10,
        strict=True,
    )


def test_what_is_left_out_is_the_default() -> None:
    assert loads(SHORT, registry=BUILT_INS) == Policy(
        scorer=Recency(),
        router=GreedyTiers(),
        tiers=(Tier("full", store=DeviceMemory()),),
        ledger=MigrationStable(),
        backend=ReferenceAttention(),
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_with_the_options_that_it_needs(name: str) -> None:
    budget = () if name == "full" else ("30 %",)
    text = f'schema = 1\npreset = "{name}"\n' + "".join(f'budget = "{each}"\n' for each in budget)
    assert loads(text, registry=BUILT_INS) == PRESETS[name](*budget)


def test_the_options_of_a_preset() -> None:
    text = """
    schema = 1
    preset = "qevict"
    budget = "512 tokens"
    bits = 4
    quantized_share = 1
    dtype = "float16"
    accounting = "paper"
    prompt_queries = 8
    """
    assert loads(text, registry=BUILT_INS) == qevict.policies.qevict(
        Tokens(512), bits=4, quantized_share=1.0, dtype=torch.float16, accounting="paper", prompt_queries=8
    )


def test_a_scorer_that_samples() -> None:
    """Written and read back; what does not fit the period is told with its remedy."""
    text = WHOLE.replace("prompt_queries = 32", "prompt_stride = 16\nobserve_tokens = 2")
    policy = loads(text, registry=BUILT_INS)
    assert policy.scorer == CumulativeAttention(prompt_stride=16, observe_tokens=2)
    assert loads(dumps(policy, registry=BUILT_INS), registry=BUILT_INS) == policy
    with pytest.raises(PolicyFileError, match=r"observe_tokens=5.*give a whole number from 1 to 4"):
        loads(text.replace("observe_tokens = 2", "observe_tokens = 5"), registry=BUILT_INS)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(WHOLE, "utf-8")
    assert load(path, registry=BUILT_INS) == load(str(path), registry=BUILT_INS) == loads(WHOLE, registry=BUILT_INS)
    path.write_bytes(b"\xef\xbb\xbf" + WHOLE.replace("\n", "\r\n").encode())
    assert load(path, registry=BUILT_INS) == loads(WHOLE, registry=BUILT_INS)


def test_the_package_lends_these_functions() -> None:
    assert (qevict.load, qevict.loads, qevict.dumps) == (load, loads, dumps)
    assert qevict.loads(SHORT) == loads(SHORT, registry=BUILT_INS)


def test_every_type_of_option() -> None:
    options = """
    name = "everything", count = 2, rate = 1, flag = true, label = "b", pair = [2, "two"], many = [1, 2.5],
    names = ["x", "y"], mode = 3, maybe = 4, either = 7, dtype = "float32", shape = "steep", level = "HIGH",
    table = { one = 1, "two words" = 2 }, point = { x = 3 }, points = [{ x = 1 }, { x = 2, y = 3 }],
    inner = { name = "cumulative", prompt_queries = 2 }, codec = ["per_token", { name = "per_channel", bits = 3 }],
    budget = "64 MiB", hidden = 5
    """
    read = loads(scorer(options.replace("\n", "")), registry=PLUGINS).scorer
    assert read == parts.Everything(
        count=2,
        rate=1.0,
        flag=True,
        label="b",
        pair=(2, "two"),
        many=(1.0, 2.5),
        names=frozenset({"x", "y"}),
        mode=3,
        maybe=4,
        either=7,
        dtype=torch.float32,
        shape=parts.Shape.STEEP,
        level=parts.Level.HIGH,
        table={"one": 1, "two words": 2},
        point=parts.Point(3.0),
        points=(parts.Point(1.0), parts.Point(2.0, 3.0)),
        inner=CumulativeAttention(2),
        codec=(PerToken(), PerChannel(3)),
        budget=Bytes(2**26),
        hidden=5,
    )
    assert isinstance(read, parts.Everything)
    assert (type(read.rate), type(read.either)) == (float, int)


def test_parts_of_plugins_need_no_code_of_theirs() -> None:
    assert loads(scorer('name = "key_norm"'), registry=PLUGINS).scorer == KeyNorm()
    assert isinstance(loads(scorer('name = "plain"'), registry=PLUGINS).scorer, parts.Plain)


def test_annotations_may_be_text() -> None:
    options = 'name = "postponed", depth = 2, inner = { x = 3 }'
    assert loads(scorer(options), registry=PLUGINS).scorer == parts.Postponed(2, parts.Point(3.0))
    message = problem(scorer('name = "postponed", unknown = 2'), PLUGINS)
    assert message.startswith("$.scorer.unknown: is a 'NotThere | None', which a file cannot hold")


# ── Refusals: the file ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"schema = \xff", "is not UTF-8: invalid start byte at byte 9; save the file as UTF-8"),
        (b"schema = 1\nbudget = = 3", "is not TOML: Invalid value (at line 2, column 10)"),
        (b"schema = 1\nschema = 1\n", "is not TOML: Cannot overwrite a value (at line 2, column 11)"),
        (b"a = " + b"[" * 10_000, "is not TOML that can be read: it is nested too deeply"),
        (b"a = " + b"9" * 5_000, "is not TOML: Exceeds the limit"),
        (b"schema = 0x" + b"f" * 5_000, "Exceeds the limit"),
    ],
    ids=["missing", "bytes", "syntax", "twice", "deep", "long", "version"],
)
def test_what_is_no_toml_file_is_refused_with_its_name(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "policy.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PolicyFileError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: 1 problem\n  $: {message}")
    assert caught.value.source == str(path)


@pytest.mark.parametrize("path", [".", "a\0b"], ids=["folder", "null"])
def test_what_is_no_file_is_refused(path: str) -> None:
    with pytest.raises(PolicyFileError, match=r"1 problem\n  \$: cannot be read: "):
        load(path)


def test_the_schema_is_named() -> None:
    expected = "expected the version of the schema, a whole number: 1"
    assert problem(SHORT.replace("schema = 1", "")) == f"$.schema: missing; {expected}"
    assert problem(SHORT.replace("schema", "shema")) == "$.shema: unknown key; did you mean 'schema'?"
    assert problem(SHORT.replace("schema = 1", 'schema = "1"')) == f'$.schema: {expected}, got "1"'
    assert problem(SHORT.replace("schema = 1", "schema = true")) == f"$.schema: {expected}, got true"


@pytest.mark.parametrize("version", [0, 2, -1])
def test_a_file_of_another_schema_is_not_judged(version: int) -> None:
    text = SHORT.replace("schema = 1", f"schema = {version}\nnew_option = 3")
    assert problem(text).startswith(f"$.schema: version {version} is not supported, this qevict reads 1; take a qevict")


# ── Refusals: keys, values and parts ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("windw_tokens = 8", "$.windw_tokens: unknown key; did you mean 'window_tokens'?"),
        ('"a b" = 8', '$."a b": unknown key; known: scorer, router, tiers'),
        ('strict = "yes"', '$.strict: expected true or false, got "yes"'),
        ("strict = 1", "$.strict: expected true or false, got 1"),
        ("window_tokens = true", "$.window_tokens: expected a whole number, got true"),
        ("window_tokens = 8.0", "$.window_tokens: expected a whole number, got 8.0"),
        ("window_tokens = [8]", "$.window_tokens: expected a whole number, got an array"),
        ("window_tokens = { a = 8 }", "$.window_tokens: expected a whole number, got a table"),
        (f"strict = 0x{'f' * 5_000}", "$.strict: Exceeds the limit"),
        ("window_tokens = 2026-01-01", "$.window_tokens: expected a whole number, got 2026-01-01"),
        ("window_tokens = 0", "$.window_tokens: window_tokens must be a whole number of at least 1, got 0"),
        ("budget = 0.2", '$.budget: expected a budget such as "20 %", "64 MiB" or "512 tokens", got 0.2'),
        ('budget = "a lot"', "$.budget: cannot read budget 'a lot'; allowed: a share"),
        (
            'granularity = "head"',
            '$.granularity: expected one of "row", "kv_head", got "head"; did you mean \'kv_head\'?',
        ),
        ('dtype = "bf16"', '$.dtype: expected a dtype of torch such as "float32", "bfloat16" or "float16", got "bf16"'),
        ('dtype = "float64"', "$.dtype: dtype=torch.float64 is not allowed; allowed: None, torch.float32"),
        ("dtype = 16", "$.dtype: expected a dtype of torch"),
        ('preset = "full"', "$.preset: a preset brings its own parts and cannot be mixed with scorer, router, tiers"),
    ],
)
def test_options_of_the_policy(line: str, message: str) -> None:
    assert problem(f"{line}\n{SHORT}").startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            'name = "cumulativ"',
            "$.scorer.name: no scorer is named 'cumulativ'; did you mean 'cumulative'? known: cumul",
        ),
        (
            'name = "greedy"',
            "$.scorer.name: no scorer is named 'greedy'; did you mean 'recency'? 'greedy' is a router;",
        ),
        ("name = 3", "$.scorer.name: expected a string, got 3"),
        ("prompt_queries = 3", "$.scorer.name: missing; expected the name of a scorer"),
        ('name = "cumulative", queries = 3', "$.scorer.queries: unknown key; did you mean 'prompt_queries'?"),
        ('name = "recency", depth = 3', "$.scorer.depth: unknown key; there are none to give"),
        ('name = "cumulative", prompt_queries = 0', "$.scorer.prompt_queries: prompt_queries is None (all) or at"),
        ('name = "cumulative", prompt_stride = 0', "$.scorer.prompt_stride: prompt_stride is a whole number of at"),
        ('name = "cumulative", observe_tokens = 0', "$.scorer.observe_tokens: observe_tokens is None (all) or at"),
    ],
)
def test_parts(options: str, message: str) -> None:
    assert problem(scorer(options)).startswith(message)


def test_a_part_is_a_name_or_a_table() -> None:
    expected = "expected the name of a scorer, or a table with its name and options"
    assert problem(SHORT.replace('"recency"', "3")) == f"$.scorer: {expected}, got 3"
    assert problem(SHORT.replace('scorer = "recency"', "")) == f"$.scorer: missing; {expected}"
    assert problem(SHORT.replace("scorer", "scorr")) == "$.scorr: unknown key; did you mean 'scorer'?"
    assert problem(SHORT.replace('"recency"', '"recenc"')).startswith("$.scorer: no scorer is named 'recenc'; did you")


@pytest.mark.parametrize(
    ("tiers", "told"),
    [
        (
            '{ name = "full" }',
            {"$.tiers": "expected an array, got a table; [[double brackets]] make a table an element"},
        ),
        ('["full"]', {"$.tiers[0]": 'expected a table, got "full"'}),
        ("[]", {"$": "tiers must be one Tier or more, hot to cold, got ()"}),
        ('[{ store = "device" }]', {"$.tiers[0].name": "missing; expected a string"}),
        (
            '[{ name = "", store = "device" }, { name = "a", keys = "per_token", store = "device" }]',
            {
                "$.tiers[0]": "a tier needs a name, got ''",
                "$.tiers[1]": "tier 'a' quantizes only one of keys and values; give both or neither",
            },
        ),
        (
            """[{ name = 3, store = { name = "device", bits = 2 }, keys = { name = "per_channel", bits = 5,
                parameters = "int8" } }]""".replace("\n", ""),
            {
                "$.tiers[0].name": "expected a string, got 3",
                "$.tiers[0].store.bits": "unknown key; there are none to give",
                "$.tiers[0].keys.bits": "bits=5 cannot be packed; allowed: 2, 3, 4, 8",
                "$.tiers[0].keys.parameters": "scales cannot be stored as torch.int8; allowed: torch.float16, "
                "torch.bfloat16, torch.float32",
            },
        ),
    ],
)
def test_tiers(tiers: str, told: dict[str, str]) -> None:
    assert problems(SHORT.replace('[{ name = "full", store = "device" }]', tiers)) == told


def test_parts_that_do_not_fit_each_other_are_told_once_each_is_fine() -> None:
    text = SHORT.replace('"greedy"', '{ name = "greedy", shares = [0.5, 0.5] }')
    assert problem(text).startswith("$: 2 shares (0.5, 0.5) for 1 tiers; give one share per tier")
    assert problem(f"min_tokens = -1\n{text}").startswith("$.min_tokens: ")


TEN = """
schema = 1
budget = "much"
windw_tokens = 4
recent_tokens = -1
strict = "no"
ledger = "migration_stable"
backend = "referense"
[scorer]
name = "cumulative"
prompt_queries = 1.5
[router]
name = "greedy"
shares = [0.3, "0.7"]
[[tiers]]
name = "full"
[[tiers]]
name = "int2"
store = "device"
keys = { name = "per_channel", bits = 5 }
values = { name = "per_token", bitz = 2 }
"""


def test_ten_mistakes_are_ten_problems(tmp_path: Path) -> None:
    path = tmp_path / "ten.toml"
    path.write_text(TEN, "utf-8")
    with pytest.raises(PolicyFileError) as caught:
        load(path)
    assert [each.path for each in caught.value.problems] == [
        "$.scorer.prompt_queries",
        "$.router.shares[1]",
        "$.tiers[0].store",
        "$.tiers[1].keys.bits",
        "$.tiers[1].values.bitz",
        "$.backend",
        "$.budget",
        "$.strict",
        "$.windw_tokens",
        "$.recent_tokens",
    ]
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}: 10 problems"
    assert "  $.tiers[1].values.bitz: unknown key; did you mean 'bits'?" in lines


# ── Refusals: presets ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('preset = "qevict"', {"$.budget": "missing; expected a budget"}),
        (
            'preset = "qevit"\nbudgt = 3',
            {"$.preset": "no preset is named 'qevit'; did you mean 'qevict'", "$.budgt": "unknown key; did you"},
        ),
        (
            "preset = 3\nbits = true",
            {"$.preset": "expected the name of a", "$.bits": "expected a whole number, got true"},
        ),
        ('prset = "full"', {"$.prset": "unknown key; did you mean 'preset'?"}),
        (
            "",
            {"$.preset": "missing; expected the name of a preset (evict_only, four_tiers, full, qevict, sinks_recent)"},
        ),
        ('preset = "full"\nbits = 2', {"$.bits": "preset 'full' has no such option; known: preset, dtype"}),
        (
            'preset = "qevict"\nbudget = "x"\nbits = 5\nwindow_tokens = 0\nquantized_share = 2\nwindow = 3\ndtype = 2',
            {
                "$.budget": "cannot read budget 'x'",
                "$.bits": "bits=5 cannot be packed; allowed: 2, 3, 4, 8",
                "$.window_tokens": "window_tokens must be a whole number of at least 1, got 0",
                "$.quantized_share": "quantized_share is the part of the bytes",
                "$.window": "preset 'qevict' has no such option; did you mean 'window_tokens'?",
                "$.dtype": "expected a dtype of torch",
            },
        ),
        (
            'preset = "full"\nwindow_tokens = 8\nscorer = "recenc"',
            {
                "$.preset": "a preset brings its own parts and cannot be mixed with scorer;",
                "$.scorer": "no scorer is na",
            },
        ),
    ],
)
def test_presets(lines: str, told: dict[str, str]) -> None:
    found = problems(f"schema = 1\n{lines}")
    assert found.keys() == told.keys()
    for path, beginning in told.items():
        assert found[path].startswith(beginning)


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ("", {}),
        (
            'how = "strict"\nbits = 3\nmin_tokens = 7\npaper = true\ndtype = "float16"\nscorer = "recency"',
            {"scorer": Recency(), "how": "strict", "bits": 3.0, "min_tokens": 7, "paper": True, "dtype": torch.float16},
        ),
    ],
    ids=["short", "all"],
)
def test_a_preset_of_a_plugin(options: str, arguments: dict[str, Any]) -> None:
    """Its own arguments are its options, parts among them; the policy that it returns is written whole."""
    policy = loads(f'schema = 1\npreset = "composed"\nbudget = "30 %"\n{options}', registry=PLUGINS)
    assert policy == parts.composed("30 %", **arguments)
    assert loads(dumps(policy, registry=PLUGINS), registry=PLUGINS) == policy


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('preset = "composd"', {"$.preset": "no preset is named 'composd'; did you mean 'composed'"}),
        (
            'preset = "composed"\nhow = "loud"\nbits = 9\nwindow = 3',
            {
                "$.budget": "missing; expected a budget",
                "$.how": 'expected one of "plain", "strict", got "loud"',
                "$.bits": "bits=9.0 is above 8",
                "$.window": "preset 'composed' has no such option",
            },
        ),
        (
            'preset = "composed"\nbudget = "5 %"\nrouter = "greedy"\nscorer = "recency"',
            {"$.preset": "a preset brings its own parts and cannot be mixed with router; remove it"},
        ),
        (
            'preset = "by_table"\nbudget = "5 %"\ntable = [1]',
            {"$.table": "is a torch.Tensor, which a file cannot hold; compose this policy in Python"},
        ),
        ('preset = "needs_depth"\nbudget = "5 %"\nsink_tokens = 4', {"$.depth": "missing; expected a whole number"}),
        ('preset = "no_policy"', {"$": "preset 'no_policy' returns a Policy, got 3"}),
        ("bits = true", {"$.preset": "missing;", "$.bits": "expected a number or a whole number, got true"}),
    ],
    ids=["name", "options", "mixed", "opaque", "required", "result", "undecided"],
)
def test_what_is_wrong_with_presets_of_plugins(lines: str, told: dict[str, str]) -> None:
    found = problems(f"schema = 1\n{lines}", PLUGINS)
    assert found.keys() == told.keys()
    for path, beginning in told.items():
        assert found[path].startswith(beginning), found[path]


# ── Refusals: parts of plugins ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("count = 4", ".count: 'count' must be in [1, 2, 3] (got 4)"),
        ("rate = true", ".rate: expected a number, got true"),
        (f"rate = 1{'0' * 400}", ".rate: OverflowError: int too large to convert to float"),
        ('pair = [1, "one", 2]', ".pair: expected an array of 2 elements, got 3"),
        ('pair = ["one", "one"]', '.pair[0]: expected a whole number, got "one"'),
        ('many = "abc"', '.many: expected an array, got "abc"'),
        ('mode = "c"', '.mode: expected one of "a", "b", 3, got "c"; known: a, b'),
        ("mode = true", '.mode: expected one of "a", "b", 3, got true'),
        ("either = []", ".either: expected a whole number or a string or a number, got an array"),
        ('shape = "FLAT"', '.shape: expected one of "flat", "steep", got "FLAT"; known: flat, steep'),
        ('level = "high"', '.level: expected one of "LOW", "HIGH", got "high"'),
        ('table = { "a.b" = "x" }', '.table."a.b": expected a whole number, got "x"'),
        ("table = 3", ".table: expected a table, got 3"),
        ("point = { y = 1 }", ".point.x: missing; expected a number"),
        ("point = { x = 1, y = -1 }", ".point.y: 'y' must be >= 0: -1.0"),
        ("point = 3", ".point: expected a table, got 3"),
        ("points = [{ x = 1 }, { x = 1, z = 1 }]", ".points[1].z: unknown key; known: x, y"),
        ('inner = { name = "cumulative", prompt_queries = 0 }', ".inner.prompt_queries: prompt_queries is None"),
        ('codec = [{ name = "per_token", bits = 7 }]', ".codec[0].bits: bits=7 cannot be packed"),
        ('budget = "x"', ".budget: cannot read budget 'x'"),
        ("_hidden = 3", "._hidden: unknown key; did you mean 'hidden'?"),
    ],
)
def test_options_of_plugins(option: str, message: str) -> None:
    assert problem(scorer(f'name = "everything", {option}'), PLUGINS).startswith(f"$.scorer{message}")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("low = 3, high = 2", {".high": "high is above low, 3, got 2"}),
        ('low = "3", high = 2', {".low": 'expected a whole number, got "3"'}),  # nothing to compare 2 with
        ("low = 10", {"": "high is above low, 10, got 9"}),
        ("low = 4", {"": "low and high; add up to 13"}),
        ("high = 1, odd = -2", {".high": "high is above low, 5, got 1", ".odd": "RuntimeError: 2 is even"}),
    ],
)
def test_fields_that_look_at_each_other(options: str, told: dict[str, str]) -> None:
    found = problems(scorer(f'name = "ordered", {options}'), PLUGINS)
    assert found == {f"$.scorer{path}": message for path, message in told.items()}


def test_an_error_of_a_part_hides_no_other() -> None:
    text = "min_tokens = -1\n" + scorer('name = "ordered", low = 4')
    assert problems(text, PLUGINS).keys() == {"$.scorer", "$.min_tokens"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('name = "plain", depth = 1', ".depth: unknown key; this part takes no options from a file, since its class"),
        ('name = "needy"', ": Needy.__init__() missing 1 required positional argument: 'depth'"),
        ('name = "codebook", entries = [1]', ".entries: is a torch.Tensor, which a file cannot hold; compose this"),
        ('name = "codebook", anything = 1', ".anything: is a Any, which a file cannot hold"),
        ('name = "bare", depth = 1', ".depth: is a value without annotation, which a file cannot hold"),
        ('name = "board"', ".entries: missing; expected a torch.Tensor, which a file cannot hold; compose this"),
    ],
)
def test_what_a_file_cannot_say_to_a_part(options: str, message: str) -> None:
    assert problem(scorer(options), PLUGINS).startswith(f"$.scorer{message}")


@pytest.mark.filterwarnings("ignore::qevict.registry.PluginWarning")
def test_a_plugin_that_failed_is_told() -> None:
    registry = Registry([EntryPoint("broken", "tests.no_such_module", "qevict")], Switches())
    message = problem(SHORT.replace('"recency"', '"broken"'), registry)
    assert message.startswith("$.scorer: scorer 'broken' cannot be had: plugin ?")
    assert "No module named 'tests.no_such_module'" in message


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────


def test_what_is_written_is_whole_ordered_and_plain() -> None:
    assert (
        dumps(loads(WHOLE, registry=BUILT_INS), registry=BUILT_INS)
        == """schema = 1
backend = "reference"
budget = "20 %"
window_tokens = 16
period_tokens = 4
sink_tokens = 3
recent_tokens = 64
granularity = "kv_head"
dtype = "bfloat16"
accounting = "paper"
min_tokens = 10
route_at = "period"
positions = "original"
keep_newest = true
strict = true
ledger = "migration_stable"

[scorer]
name = "cumulative"
prompt_queries = 32
prompt_stride = 1

[router]
name = "greedy"
shares = [
    0.3,
    0.7,
]
scope = "lane"

[[tiers]]
name = "full"
store = "device"

[[tiers]]
name = "int2"
store = "device"

[tiers.keys]
name = "per_channel"
bits = 2
parameters = "float16"
scope = "window"
centred = false
rotated = false
normed = false
levels = "uniform"

[tiers.values]
name = "per_token"
bits = 4
parameters = "float32"
centred = false
channel_scaled = false
rotated = false
levels = "uniform"
"""
    )


QUANTIZERS = [
    kind(bits, parameters, rotated=rotated, scale_bits=8 if rotated else None)
    for kind in (PerChannel, PerToken)
    for bits in (2, 3, 4, 8)
    for parameters in (torch.float16, torch.bfloat16, torch.float32)
    for rotated in (False, True)
]


def quantizers() -> st.SearchStrategy[Any]:
    """Made beforehand: what checks the types of tuples draws random numbers, which a strategy may not."""
    return st.sampled_from(QUANTIZERS)


def tiers() -> st.SearchStrategy[tuple[Tier, ...]]:
    """The hottest tier is in full precision or encoded, all others are encoded."""
    encoded = st.tuples(quantizers(), quantizers())

    def name(codecs: list[Any]) -> st.SearchStrategy[tuple[Tier, ...]]:
        names = st.lists(st.text(min_size=1), min_size=len(codecs), max_size=len(codecs), unique=True)
        return names.map(lambda names: tuple(itertools.starmap(tier, zip(names, codecs, strict=True))))

    def tier(name: str, codec: Any) -> Tier:
        return Tier(name, *(codec or ()), store=DeviceMemory())

    codecs = st.tuples(st.none() | encoded, st.lists(encoded, max_size=3))
    return codecs.flatmap(lambda codecs: name([codecs[0], *codecs[1]]))


COUNTS = st.integers(1, 2**70)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "scorer": st.builds(CumulativeAttention, st.none() | COUNTS) | st.just(Recency()) | st.just(KeyNorm()),
    "tiers": tiers(),
    "budget": st.none()
    | st.builds(Fraction, st.floats(0, 1, exclude_min=True))
    | st.builds(Bytes, COUNTS)
    | st.builds(Tokens, COUNTS),
    "window_tokens": st.integers(2, 64),
    "period_tokens": st.integers(1, 2**31 - 1),
    "sink_tokens": st.integers(0, 100),
    "recent_tokens": st.integers(0, 100),
    "granularity": st.sampled_from(["row", "kv_head"]),
    "dtype": st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
    "accounting": st.sampled_from(["exact", "paper"]),
    "min_tokens": st.integers(0, 100),
    "strict": st.booleans(),
}


@given(options=st.fixed_dictionaries(OPTIONS), weights=st.lists(st.integers(0, 100), min_size=4, max_size=4))
@settings(max_examples=30, deadline=None)
def test_what_is_written_is_read_back(options: dict[str, Any], weights: list[int]) -> None:
    first, *others = weights[: len(options["tiers"])]
    total = 1 + first + sum(others)
    router = GreedyTiers(((1 + first) / total, *(weight / total for weight in others)))
    policy = Policy(router=router, ledger=MigrationStable(), backend=ReferenceAttention(), **options)
    text = dumps(policy, registry=PLUGINS)
    again = loads(text, registry=PLUGINS)
    assert again == policy
    assert hash(again) == hash(policy)
    assert dumps(again, registry=PLUGINS) == text


def everythings() -> st.SearchStrategy[Any]:
    finite = st.floats(allow_nan=False)
    points = st.builds(parts.Point, finite, st.floats(min_value=0, allow_nan=False))
    return st.builds(
        parts.Everything,
        count=st.sampled_from([1, 2, 3]),
        rate=finite,
        flag=st.booleans(),
        label=st.text(),
        pair=st.tuples(st.integers(), st.text()),
        many=st.lists(finite).map(tuple),
        names=st.frozensets(st.text()),
        mode=st.sampled_from(["a", "b", 3]),
        maybe=st.none() | st.integers(),
        either=st.integers() | st.text() | finite,
        dtype=st.sampled_from([torch.float16, torch.int8, torch.float8_e5m2]),
        shape=st.sampled_from(parts.Shape),
        level=st.sampled_from(parts.Level),
        table=st.dictionaries(st.text(), st.integers()),
        point=points,
        points=st.lists(points).map(tuple),
        inner=st.none() | st.just(Recency()) | st.builds(CumulativeAttention, st.integers(1)),
        codec=st.lists(quantizers()).map(tuple),
        budget=st.none() | st.just(Fraction(1 / 3)),
        hidden=st.integers(),
    )


@given(everythings())
@settings(max_examples=30, deadline=None)
def test_options_of_every_type_are_read_back(part: parts.Everything) -> None:
    text = dumps(using(part), registry=PLUGINS)
    assert loads(text, registry=PLUGINS).scorer == part
    assert dumps(loads(text, registry=PLUGINS), registry=PLUGINS) == text


@pytest.mark.parametrize(
    "text",
    ["7 %", "12.5 %", "33.333333 %", "0.1234567890123456", "64 MiB", "3 GiB", "5 KiB", "1000001 B", "512 tokens"],
)
def test_budgets_are_written_as_people_write_them(text: str) -> None:
    assert f'budget = "{text}"\n' in dumps(evict_only(text))


def test_equal_policies_are_written_alike() -> None:
    one, other = (using(parts.Everything(table=table)) for table in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert one == other
    assert dumps(one, registry=PLUGINS) == dumps(other, registry=PLUGINS)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_written_with_all_their_parts(name: str) -> None:
    policy = PRESETS[name](*([] if name == "full" else ["30 %"]))
    assert loads(dumps(policy)) == policy


def test_a_part_without_options_is_its_name() -> None:
    for part in (parts.Plain(), parts.Stateful(), parts.Codebook()):
        text = dumps(using(part), registry=PLUGINS)
        assert f'scorer = "{part.name}"' in text
        assert dumps(loads(text, registry=PLUGINS), registry=PLUGINS) == text


@attrs.frozen
class Unknown(parts.Mute):
    name = "unknown"


class Impostor(parts.Mute):
    name = "recency"


class Finer(Policy):
    """Not what a file would make."""


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            using(Unknown()),
            r"$.scorer: tests.test_config.Unknown is not registered as scorer 'unknown': it exists in Py",
        ),
        (
            using(Impostor()),
            "$.scorer: tests.test_config.Impostor is not registered as scorer 'recency': that name bel",
        ),
        (using(parts.Stateful(2)), "$.scorer: tests.config_parts.Stateful has options that a file cannot hold"),
        (using(parts.Needy(2)), "$.scorer: Needy.__init__() missing 1 required positional argument: 'depth'"),
        (using(parts.Codebook(torch.ones(2))), "$.scorer.entries: is a torch.Tensor, which a file cannot hold"),
        (using(parts.Limited(None)), "$.scorer.limit: is None, which TOML cannot say, and to leave it out means"),
        (using(parts.Limited(others=(1, None))), "$.scorer.others[1]: expected a whole number, got None"),
        (using(parts.Doubling(2)), "$.scorer.depth: would be read back as something else; compose this policy in Py"),
        (using(parts.Ordered(low=True)), "$.scorer.low: expected a whole number, got true"),
        (Finer(**attrs.asdict(evict_only("20 %"), recurse=False)), "$: is a tests.test_config.Finer; only a qevict"),
    ],
    ids=["unknown", "impostor", "stateful", "needy", "tensor", "none", "inner-none", "doubling", "bool", "subclass"],
)
def test_what_a_file_would_not_give_back_is_not_written(policy: Policy, message: str) -> None:
    assert unwritten(policy, PLUGINS).startswith(message)


def test_all_that_cannot_be_written_is_told() -> None:
    policy = using(parts.Everything(inner=Unknown(), rate=float("nan"), codec=(PerToken(),)))
    assert unwritten(attrs.evolve(policy, ledger=MigrationStable()), PLUGINS).startswith("$.scorer.inner: ")
    both = attrs.evolve(using(Unknown()), tiers=(Tier("full", store=DeviceMemory()),))
    assert unwritten(both).count("\n") == 0


# ── The error ─────────────────────────────────────────────────────────────────────────────────────


def test_the_error_says_it_all_and_travels() -> None:
    error = PolicyFileError([Problem("$.a", "is wrong"), Problem("$.b", "is too")], "policy.toml")
    assert isinstance(error, PolicyError)
    assert str(error) == "policy.toml: 2 problems\n  $.a: is wrong\n  $.b: is too"
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - just pickled
    assert (again.problems, again.source, str(again)) == (error.problems, error.source, str(error))
    assert str(PolicyFileError([Problem("$", "is wrong")])) == "policy: 1 problem\n  $: is wrong"


@pytest.mark.parametrize("hint", [typing.List, typing.Dict, typing.Tuple, typing.Sequence, typing.Mapping, tuple[()]])  # noqa: UP006 - plugins may write them so
def test_a_container_of_nobody_knows_what_is_what_a_file_cannot_hold(hint: object) -> None:
    assert "cannot hold" in form_of(hint, BUILT_INS).what


@pytest.mark.parametrize("text", [None, b"schema = 1", Path("own.toml")])
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_text_is_told_apart(text: Any) -> None:
    with pytest.raises(PolicyFileError, match="loads takes text, load takes a path"):
        loads(text)
