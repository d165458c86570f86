"""One command per job, the same on every system: ``python tools/dev.py <command>``.

Needs nothing but Python itself. The first command makes ``.venv`` beside this folder and installs the project
there; later ones find it ready.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - whoever starts this with an old Python gets a sentence
    sys.exit(
        "qevict needs Python 3.11 or newer; this is Python {}.{}.\n"
        "Start it with a newer one: python3.12 tools/dev.py ... or make PYTHON=python3.12 ...".format(*sys.version_info)
    )

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
import time
import tomllib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = "Scripts" if os.name == "nt" else "bin"
SUFFIX = ".exe" if os.name == "nt" else ""

# What is installed in editable form, in this order; sibling distributions of this repository go here.
DISTRIBUTIONS = (".[dev,demo]", "baselines")
# What is compiled against the torch that these bring along; it installs without a compiler too, and says what it lacks.
COMPILED = ("plugins/qevict-fused",)
DECIDES_THE_INSTALL = ("build-system", "project")  # tables of pyproject.toml; the rest only configures tools
PIN = re.compile(r"[\w.-]+==\S+")
PIP_TELLS = ("Collecting", "Downloading", "Processing", "Installing", "qevict-fused comes without")
NEEDED_BYTES = 3 * 2**30  # the CUDA build of torch, which pip prefers on Linux, takes twice as much

LEFTOVERS = (
    ".venv",
    ".venv-oldest",
    ".venv-torch",
    ".native",
    "site",
    "build",
    "dist",
    "plugins/qevict-fused/build",
    ".benchmarks",
    ".hypothesis",
    ".import_linter_cache",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
)
SOURCES = ("src", "tests", "tools", "plugins", "baselines", "benchmarks")

# What pip's output may contain -> what to do about it.
PIP_REMEDIES = (
    ("No space left on device", "Free some disk space, or point TMPDIR at a roomier disk."),
    ("ResolutionImpossible", "pyproject.toml and constraints.txt contradict each other: renew the pins."),
    ("No matching distribution", "A pin has no build for this Python or system: try Python 3.11."),
    ("hash", "A download arrived damaged: run the command again."),
    ("Connection", "The package index was not reached: check the network and pip's configuration."),
    ("resolution", "The package index was not reached: check the network and pip's configuration."),
    ("timed out", "The package index was slow: run the command again, finished downloads are kept."),
)


@dataclass(frozen=True)
class Environment:
    """A virtual environment: its folder, what is installed, whose packages it also sees, what is compiled there."""

    folder: Path
    wanted: tuple[str, ...]
    base: "Environment | None" = None
    compiled: tuple[str, ...] = ()

    def program(self, name: str) -> str:
        """Return the path of an installed program."""
        return str(self.folder / SCRIPTS / f"{name}{SUFFIX}")

    def module(self, name: str, *args: str) -> tuple[str, ...]:
        """Return the command line of ``python -m name args``."""
        return (self.program("python"), "-m", name, *args)

    @property
    def stamp(self) -> Path:
        """What was installed, as a digest."""
        return self.folder / "qevict-stamp"


MAIN = Environment(
    ROOT / ".venv", ("-c", "constraints.txt", *(f"-e{each}" for each in DISTRIBUTIONS)), compiled=COMPILED
)
NATIVE = ROOT / ".native"
OLDEST = Environment(ROOT / ".venv-oldest", ("-r", "constraints-oldest.txt"), base=MAIN)


@dataclass(frozen=True)
class Check:
    """One command inside a virtual environment; it passes when it exits with 0."""

    name: str
    argv: tuple[str, ...]
    environment: Environment = MAIN
    folder: Path = ROOT
    variables: tuple[tuple[str, str], ...] = ()


module = MAIN.module
RUFF = Check("ruff check", module("ruff", "check", "."))
FORMAT = Check("ruff format", module("ruff", "format", "--check", "."))
MYPY = Check("mypy", module("mypy"))
FLOORS = Check("lint-imports", (MAIN.program("lint-imports"),))
DOCS = Check("mkdocs", module("mkdocs", "build", "--strict", "--quiet"))
TESTS = Check("pytest", module("pytest", "-n", "auto", "-m", "not real and not slow and not exhaustive"))
SLOW = Check("pytest, slow", module("pytest", "-n", "auto", "-m", "slow and not real and not exhaustive"))
REAL = Check(
    "pytest, real model", module("pytest", "-n", "auto", "--dist", "loadfile", "-m", "real and not exhaustive")
)
DEMO = Check("demo", module("qevict.cli", "demo"))


def give_up(problem: str, remedy: str, details: Sequence[str] = ()) -> NoReturn:
    """Say what is wrong, what it looked like and what to do, then stop."""
    for line in details:
        print(f"  | {line}")
    sys.exit(f"\n{problem}\n{remedy}")


def fingerprint(environment: Environment) -> str:
    """Digest everything that an installed environment depends on."""
    folders = [ROOT / each.partition("[")[0] for each in (*DISTRIBUTIONS, *environment.compiled)]
    projects = [tomllib.loads((folder / "pyproject.toml").read_text("utf-8")) for folder in folders]
    asked = [project[table] for project in projects for table in DECIDES_THE_INSTALL]
    pins = [path.read_text("utf-8") for path in sorted(ROOT.glob("constraints*.txt"))]
    everything = [sys.version, str(ROOT), environment.wanted, asked, pins]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def compilation(environment: Environment) -> str:
    """Digest what decides what is compiled, the compilers that are there among it."""
    folders = [ROOT / each for each in environment.compiled]
    paths = [path for folder in folders for path in sorted([folder / "setup.py", *(folder / "csrc").iterdir()])]
    everything = [[path.read_text("utf-8") for path in paths], [shutil.which(name) for name in ("g++", "clang++")]]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()


def is_ready(environment: Environment) -> bool:
    """Tell whether an environment holds what this checkout asks for."""
    stamp = environment.stamp
    there = stamp.is_file() and Path(environment.program("python")).exists()
    return there and stamp.read_text("utf-8") == fingerprint(environment)


def check_space(environment: Environment) -> None:
    """Stop before an installation that the disk has no room for."""
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES and not environment.base and not Path(environment.program("python")).exists():
        give_up(
            f"{free / 2**30:.1f} GiB are free here; the environment (torch above all) needs about "
            f"{NEEDED_BYTES / 2**30:.0f} GiB.",
            "Free some disk space and run the command again.",
        )


def make_venv(environment: Environment) -> None:
    """Create the folder of an environment, over what an interrupted run may have left."""
    check_space(environment)
    print(f"Making {environment.folder} with Python {sys.version.split()[0]}", flush=True)
    argv = [sys.executable, "-m", "venv", "--clear", str(environment.folder)]
    if environment.base:
        argv.append("--without-pip")
    made = subprocess.run(argv, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        give_up(
            "Python could not make a virtual environment.",
            "On Debian and Ubuntu the module is a package of its own: apt install python3-venv. "
            "Elsewhere reinstall Python with its venv and ensurepip modules.",
            (made.stdout + made.stderr).splitlines()[-10:],
        )
    if environment.base:
        # Comes last on sys.path: what is installed here goes before what is installed there, pip included.
        line = f"import site; site.addsitedir({str(packages_of(environment.base))!r})"
        (packages_of(environment) / "qevict-base.pth").write_text(line, "utf-8")


def packages_of(environment: Environment) -> Path:
    """Return the folder that an environment installs packages into."""
    found = sysconfig.get_path("purelib", "venv", {"base": str(environment.folder)})
    return Path(found)


def install(environment: Environment) -> None:
    """Install what an environment is to hold."""
    minutes = "a minute" if environment.base else "some minutes the first time; torch is the bulk of it"
    print(f"Installing ({minutes})", flush=True)
    pip_install(environment, environment.wanted)


def compile_all(environment: Environment) -> None:
    """Compile what is to be compiled, if anything of it has changed."""
    stamp, wanted = environment.folder / "qevict-compiled-stamp", compilation(environment)
    if stamp.is_file() and stamp.read_text("utf-8") == wanted:
        return
    for each in environment.compiled:
        print(f"Compiling {each} (a minute)", flush=True)
        pip_install(environment, ("-v", "--no-build-isolation", "--no-deps", "-e", each))
    stamp.write_text(wanted, "utf-8")


def pip_install(environment: Environment, wanted: Sequence[str]) -> None:
    """Run pip; print what it is at, keep its last words."""
    argv = [*environment.module("pip", "install", "--no-input", "--progress-bar", "off"), *wanted]
    logged = environment.folder / "qevict-install.log"
    last: deque[str] = deque(maxlen=20)
    pip = subprocess.Popen(
        argv, cwd=ROOT, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with pip, logged.open("a", encoding="utf-8") as log:
        for line in pip.stdout or ():
            log.write(line)
            last.append(line.rstrip())
            if line.lstrip().startswith(PIP_TELLS):
                print(f"  {line.strip()[:100]}", flush=True)
    if pip.returncode != 0:
        said = "\n".join(last)
        remedies = [remedy for needle, remedy in PIP_REMEDIES if needle in said]
        give_up(
            f"pip failed; all of its output is in {logged}.",
            (remedies or ["Mend what pip names above and run the command again."])[0],
            last,
        )


def ensure(environment: Environment) -> None:
    """Bring an environment up to date; instant when nothing has changed."""
    if environment.base:
        ensure(environment.base)
    began = time.monotonic()
    if not is_ready(environment):
        make_venv(environment)
        install(environment)
        environment.stamp.write_text(fingerprint(environment), "utf-8")
        print(f"Environment ready after {time.monotonic() - began:.0f} s\n", flush=True)
    compile_all(environment)


def run(check: Check, extra: Sequence[str] = ()) -> int:
    """Run one check in the repository root and return its exit status."""
    print(f"── {check.name} {'─' * (90 - len(check.name))}", flush=True)
    environment = os.environ | {"PYTHONUTF8": "1", "NO_MKDOCS_2_WARNING": "true"} | dict(check.variables)
    return subprocess.run([*check.argv, *extra], cwd=check.folder, env=environment, check=False).returncode


def run_all(checks: Sequence[Check], extra: Sequence[str]) -> int:
    """Run every check, also after a failure; `extra` goes to the last. Several end in a table."""
    rows: list[tuple[str, int, float]] = []
    for check in checks:
        ensure(check.environment)
        began = time.monotonic()
        status = run(check, extra if check is checks[-1] else ())
        rows.append((check.name, status, time.monotonic() - began))
    if len(rows) > 1:
        print(f"\n{'check':<20}{'result':<10}{'seconds':>8}")
        for name, status, seconds in rows:
            print(f"{name:<20}{'ok' if status == 0 else 'FAILED':<10}{seconds:>8.1f}")
    return max(min(abs(status), 1) for _, status, _ in rows) if len(rows) > 1 else rows[0][1]


def test_versions(extra: Sequence[str]) -> int:
    """Run the tests of the Hugging Face floor on other versions; words such as ``torch==2.10.0`` name them."""
    pins = tuple(word for word in extra if PIN.fullmatch(word))
    environment = OLDEST
    if any(pin.startswith("torch==") for pin in pins):
        environment = Environment(ROOT / ".venv-torch", ("-e.[test]", *pins))
    elif pins:
        environment = Environment(OLDEST.folder, pins, base=MAIN)
    quick = "not real and not slow and not exhaustive"  # the last -m counts: `test-versions -m slow` runs the rest
    argv = environment.module("pytest", "-n", "auto", "-m", quick, "tests/hf")
    check = Check(f"pytest, {' '.join(pins) or 'oldest transformers'}", argv, environment)
    return run_all([check], [word for word in extra if word not in pins])


def test_native(extra: Sequence[str]) -> int:
    """Run the tests of what is compiled on a build that watches addresses and undefined behaviour."""
    libraries = [library_of(name) for name in ("libasan.so", "libstdc++.so")]
    if not all(libraries):
        give_up("The sanitizers of GCC are not here.", "On Debian and Ubuntu: apt install g++. They need Linux.")
    own, python = str(NATIVE), MAIN.program("python")
    argv = (python, "setup.py", "--quiet", "build", "--build-lib", own, "--build-temp", str(NATIVE / "build"))
    build = Check("build", argv, folder=ROOT / COMPILED[0], variables=(("QEVICT_SANITIZE", "1"),))
    watched = (("PYTHONPATH", own), ("LD_PRELOAD", " ".join(libraries)), ("ASAN_OPTIONS", "detect_leaks=0"))
    seen = "import pathlib; assert 'libasan' in pathlib.Path('/proc/self/maps').read_text(); import qevict_fused.native"
    check = Check(
        "sanitizers", (python, "-c", f"{seen} as n; assert n.missing() is None, n.missing()"), variables=watched
    )
    quick = "not real and not slow and not exhaustive"
    tests = Check("pytest, native", module("pytest", "-m", quick, "tests/fused"), variables=watched)
    return run_all([build, check, tests], extra)


def library_of(name: str) -> str:
    """Return the path of a library that comes with GCC; nothing if it does not."""
    gcc = shutil.which("gcc")
    if gcc is None:
        return ""
    told = subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    path = Path(told.stdout.strip())
    return str(path) if path.is_absolute() else ""


def clean(_: Sequence[str]) -> int:
    """Remove what these commands and their tools have written."""
    caches = [path for name in SOURCES for path in (ROOT / name).rglob("__pycache__")]
    for path in [*(ROOT / name for name in LEFTOVERS), *caches]:
        if path.is_dir():
            shutil.rmtree(path)
            print(f"removed {path.relative_to(ROOT)}")
    for path in (ROOT / "plugins").rglob("*.so"):
        path.unlink()
        print(f"removed {path.relative_to(ROOT)}")
    return 0


def checks(*table: Check) -> Callable[[Sequence[str]], int]:
    """Make a command out of checks."""
    return lambda extra: run_all(table, extra)


# The commands. A new one is a line here and a word in the Makefile.
TARGETS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "demo": ("compress a document under SmolLM2 and ask about it", checks(DEMO)),
    "test": ("every check but slow tests and real models", checks(RUFF, FORMAT, MYPY, FLOORS, DOCS, TESTS)),
    "lint": ("style, types, floors", checks(RUFF, FORMAT, MYPY, FLOORS)),
    "docs": ("build the documentation into site/", checks(DOCS)),
    "test-versions": ("the hf tests on the oldest transformers, or on versions that you name", test_versions),
    "test-native": ("the tests of compiled code under sanitizers", test_native),
    "test-slow": ("compatibility, the state machine, programs that are started", checks(SLOW)),
    "test-real": ("the tests on real models", checks(REAL)),
    "clean": ("remove the environment, caches and build outputs", clean),
}


def main(argv: Sequence[str]) -> int:
    """Run the command that `argv` names."""
    parser = argparse.ArgumentParser(
        prog="tools/dev.py",
        description="qevict, for those who work on it.",
        epilog="\n".join(f"  {name:<15}{text}" for name, (text, _) in TARGETS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=TARGETS, metavar="command", help="one of those below")
    parser.add_argument("extra", nargs=argparse.REMAINDER, help="passed on to the last program that runs")
    options = parser.parse_args(argv)
    _, command = TARGETS[options.command]
    try:
        return command(options.extra)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
