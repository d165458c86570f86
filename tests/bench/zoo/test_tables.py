"""A record in Markdown, in words and as a plot."""

from pathlib import Path

import attrs
import pytest

from qevict.bench.zoo.compare import scenes
from qevict.bench.zoo.plot import draw, file_name
from qevict.bench.zoo.record import Record, load_record
from qevict.bench.zoo.tables import claims, markdown, table
from qevict.errors import InputError


def test_a_table_has_a_line_for_each_policy_by_its_bytes(record: Record) -> None:
    own = next(scene for scene in scenes(record.rows) if scene.title == "needle")
    lines = table(own).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        f"| {name}" for name in ("full", "codec", "QEvict, 20 %", "QEvict, 10 %", "ours, 10 %", "lone, 10 %")
    ]
    assert lines[2] == "| full | 100.0 % | 4 |  |  |  | 0.75 | yes |"
    differences = "+0.38 (+0.34 to +0.40) | -1.62 (-1.66 to -1.60) | -0.72 (-0.84 to -0.60)"
    assert lines[6] == f"| ours, 10 % | 10.0 % | 4 | {differences} | 0.75 | yes |"
    assert lines[7] == "| lone, 10 % | 10.0 % | 1 |  |  |  | 1.00 | not told |"
    assert {line.count("|") for line in lines} == {9}


def test_only_what_excludes_zero_is_claimed(record: Record) -> None:
    own = next(scene for scene in scenes(record.rows) if scene.title == "needle")
    told = list(claims(own))
    assert "ours, 10 % loses 1.62 nats less than QEvict at equal bytes (-1.66 to -1.60)" in told
    assert "ours, 10 % loses 0.72 nats less than QEvict at 20 % (-0.84 to -0.60)" in told
    assert "QEvict, 10 % loses 0.90 nats more than QEvict at 20 % (+0.80 to +1.00)" in told
    assert not [claim for claim in told if claim.startswith(("full", "lone"))]
    same = attrs.evolve(own, seen={**own.seen, ("twin", "20 %"): own.seen["QEvict", "20 %"]})
    assert not [claim for claim in claims(same) if claim.startswith("twin")]


def test_all_scenes_stand_under_a_legend(record: Record) -> None:
    text = markdown(scenes(record.rows))
    assert text.startswith("Loss: nats")
    assert text.count("### ") == 4
    sections = {part.split(",")[0]: part for part in text.split("### ")[1:]}
    assert [title for title, part in sections.items() if "\n* ours, 10 % loses" in part] == ["retrieval", "perplexity"]
    assert "### perplexity, 900 tokens, before the question is seen\n\n| policy |" in text


def test_a_record_comes_back_from_its_file(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    record.write(path)
    assert load_record(path) == record
    assert path.read_text("utf-8").count("\n") < 60, "a row is a line"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 1, "rows": [{"task": "needle"}]}', '{"version": 2, "rows": []}']
)
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    path.write_text(text, "utf-8")
    with pytest.raises(InputError, match=r"no record|version 2"):
        load_record(path)


def test_plots_are_the_same_every_time(record: Record, tmp_path: Path) -> None:
    own = next(iter(scenes(record.rows)))
    assert file_name(own) == "zoo-retrieval-900-unseen.svg"
    for name in ("one.svg", "two.svg"):
        draw(own, tmp_path / name)
    one = (tmp_path / "one.svg").read_text("utf-8")
    assert one == (tmp_path / "two.svg").read_text("utf-8")
    assert all(f">{name}<" in one for name in ("QEvict", "ours", "codec"))


def test_a_missing_matplotlib_is_named(record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"qevict\[plots\]"):
        draw(next(iter(scenes(record.rows))), tmp_path / "one.svg")
