"""Every page does what it says: its blocks run in order, in one namespace and in one folder.

A ``python`` block runs. What it prints contains the lines of a ``text title="output"`` block behind it.
Any other block with a title is saved under that name; a ``toml`` block without one loads, where it has a schema.
Of a ``console`` block, lines ``$ qevict ...`` and ``$ pytest ...`` run and print the lines below them,
``$ pip install FOLDER`` is played by hand, and other lines are not run; nor is ``$ qevict bench``, which takes
an hour.
The folder has the checkout's ``docs`` in it.

The Chinese README is not run: ``test_reference.py`` holds its code equal to the other's.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import qevict
import qevict.errors
import qevict_baselines.plugin
from qevict.registry import Registry

ROOT = Path(__file__).parents[2]
SOURCES = [Path(each).parents[1] for each in (qevict.errors.__file__, qevict_baselines.plugin.__file__)]
BLOCK = re.compile(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
NEEDS_A_MODEL = re.compile(r"bench\.models import load|^\$ qevict (demo|generate)", re.MULTILINE)
STARTS_PROGRAMS = re.compile(r"^\$ (qevict|pytest) ", re.MULTILINE)
PROGRAMS = {"qevict": "qevict.cli", "pytest": "pytest -q -p no:cacheprovider"}


def pages() -> Iterator[object]:
    readmes = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "baselines" / "README.md"]
    for page in [*readmes, *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text("utf-8")
        blocks = "".join(match[0] + "\n" for match in BLOCK.finditer(text))
        if blocks:
            marks = [pytest.mark.real] * bool(NEEDS_A_MODEL.search(blocks))
            marks += [pytest.mark.slow] * bool(STARTS_PROGRAMS.search(blocks))
            yield pytest.param(text, id=page.relative_to(ROOT).as_posix(), marks=marks)


@pytest.mark.parametrize("text", [*pages()])
def test_page_does_what_it_says(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Registry, "offered_backends", lambda _: ())  # as where nothing was compiled
    namespace: dict[str, object] = {"__name__": "documentation"}
    printed: str | None = None
    for language, title, block in BLOCK.findall(text):
        if title == "output":
            assert printed is not None
            assert stripped(block) in stripped(printed)
        elif title:
            Path(title).parent.mkdir(parents=True, exist_ok=True)
            Path(title).write_text(block, "utf-8")
        elif language == "python":
            printed = printed_by(block, namespace)
        elif language == "toml" and "schema =" in block:
            policy = qevict.loads(block)
            assert qevict.loads(qevict.dumps(policy)) == policy
        elif language == "console":
            for line, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
                printed = run(line)
                if printed is not None:
                    assert_shown(shown, printed)


def printed_by(block: str, namespace: dict[str, object]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(block, "documentation", "exec"), namespace)  # noqa: S102 - the documentation's own code
    return out.getvalue()


def run(line: str) -> str | None:
    """Run a line of the console in this folder; gives what it printed, or None if it is not for us to run."""
    program, _, rest = line.partition(" ")
    if folder := re.match(r"pip install (?:-e )?(?:\./)?(\w+)", line):
        install(next(each for each in (Path(folder[1]), ROOT / folder[1]) if each.exists()))
    if program not in PROGRAMS or rest.startswith("bench "):
        return None
    sources = os.pathsep.join(map(str, (*Path.cwd().glob("**/src"), Path.cwd(), *SOURCES)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QEVICT_") or "CACHE" in name}
    kept["QEVICT_DISABLE_PLUGINS"] = "qevict-fused"
    done = subprocess.run(  # noqa: S602 - the documentation's own lines, with their redirections
        f'"{sys.executable}" -m {PROGRAMS[program]} {rest}',
        shell=True,
        env=kept | {"PYTHONPATH": sources, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def install(project: Path) -> None:
    """What ``pip install -e`` leaves behind of a plugin: its metadata, where Python looks for it."""
    described = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    info = Path(f"{described['name'].replace('-', '_')}-{described['version']}.dist-info")
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {described['name']}\nVersion: {described['version']}\n"
    (info / "METADATA").write_text(head, "utf-8")
    entries = "".join(f"{name} = {module}\n" for name, module in described["entry-points"]["qevict"].items())
    (info / "entry_points.txt").write_text(f"[qevict]\n{entries}", "utf-8")


def stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def assert_shown(shown: str, printed: str) -> None:
    """Each line that a page shows was printed, wherever it was broken."""
    flat = " ".join(printed.split())
    for line in shown.splitlines():
        assert " ".join(line.split()) in flat, f"{line}\nis not in\n{printed}"


def test_there_are_blocks() -> None:
    assert len([*pages()]) >= 8
