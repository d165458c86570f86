"""Options, the loaded model, rounds and records: what all measurements share."""

import gc
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from benchmarks import record as records
from benchmarks.attending import l3_bytes
from benchmarks.contestants import Contestant, by_policy, cheap_to_fill, name_of, not_measured, plans, stock_field
from benchmarks.memory import Job, can_measure, peak_bytes
from qevict.bench.models import PACKAGED, SMOLLM2, fetch, quiet_libraries
from qevict.bench.provenance import provenance
from qevict.bench.speed import Runners, take_turns
from qevict.policy import Policy

_SHOWN = pytest.StashKey[list[Any]]()


@attrs.frozen
class Wish:
    """What was asked for on the command line.

    Attributes:
        model: ``smollm2`` or a folder written by ``save_pretrained``.
        tokens: length of the context.
        lengths: contexts through which a line is laid.
        rounds: paired rounds that count; one more warms up.
        budget: of the compressing policies.
        contestants: regular expression that a policy's name must hold.
        threads: CPU threads of torch.
        ragged_rows: rows of the batch whose rows differ in length.
        rows: rows of the batch that generates.
        beyond_l3: attention alone cycles through so many times the bytes of the L3 cache.
        prompt: tokens of the prompt of the generation.
        new: tokens to generate.
        peaks: measure peak memory, which this system allows.
        write: record what was found.
        results: where.
        command: the line that asks for the same.
    """

    model: str
    tokens: int
    lengths: tuple[int, ...]
    rounds: int
    budget: str
    contestants: str
    threads: int
    ragged_rows: int
    rows: int
    beyond_l3: float
    prompt: int
    new: int
    peaks: bool
    write: bool
    results: Path
    command: str

    def policies(self, computed: torch.dtype) -> dict[str, Policy]:
        """The policies that were asked for, under names of their own."""
        return {
            name: policy for name, policy in plans(self.budget, computed).items() if re.search(self.contestants, name)
        }

    def peak(self, job: str, name: str, model: Any, folder: str, *, rows: int, tokens: int, new: int) -> int | None:
        """Peak bytes of a job in a process of its own; None where they are not wanted, or cannot be had."""
        if not self.peaks:
            return None
        return peak_bytes(
            Job(
                job=job,
                folder=folder,
                dtype=name_of(model.dtype),
                name=name,
                budget=self.budget,
                threads=self.threads,
                rows=rows,
                tokens=tokens,
                new=new,
            )
        )

    def field(self, computed: torch.dtype) -> dict[str, Contestant]:
        """All contestants behind a synthetic context; stock caches always take part."""
        chosen = self.policies(computed)
        return stock_field() | {name: by_policy(cheap_to_fill(policy)) for name, policy in chosen.items()}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of all measurements."""
    own = parser.getgroup("measurements of qevict")
    own.addoption("--model", default=SMOLLM2, help="smollm2, gemma3-270m, or a folder written by save_pretrained")
    own.addoption("--tokens", type=int, default=4096, help="length of the context")
    own.addoption("--lengths", default="1024,2048,4096,8192,16384", help="contexts through which a line is laid")
    own.addoption("--rounds", type=int, default=5, help="paired rounds that count; one more warms up")
    own.addoption("--budget", default="20 %", help="of the compressing policies")
    own.addoption("--contestants", default="", help="policies to measure: part of their names, a regular expression")
    own.addoption("--threads", type=int, default=1, help="CPU threads of torch")
    own.addoption("--ragged-rows", type=int, default=8, help="rows of the ragged batch")
    own.addoption("--rows", type=int, default=4, help="rows of the batch that generates")
    own.addoption("--beyond-l3", type=float, default=1.25, help="attention alone cycles so many L3 caches")
    own.addoption("--prompt", type=int, default=256, help="tokens of the prompt of the generation")
    own.addoption("--new", type=int, default=128, help="tokens to generate")
    own.addoption("--no-peaks", action="store_true", help="leave out peak memory, which takes a process each")
    own.addoption("--write", action="store_true", help="record what was found")
    own.addoption("--results", default=str(records.RESULTS), help="where it is recorded")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what would falsify a time."""
    if config.getoption("benchmark_disable") or config.getoption("jaxtyping_packages", default=None):
        raise pytest.UsageError("times are measured without run-time type checks: run `pytest benchmarks`, and only it")
    config.stash[_SHOWN] = []
    quiet_libraries()


@pytest.fixture(scope="session")
def wish(pytestconfig: pytest.Config) -> Wish:
    """The options; torch is bound to the threads that they name."""
    ask = pytestconfig.getoption
    found = Wish(
        model=ask("model"),
        tokens=ask("tokens"),
        lengths=tuple(int(each) for each in ask("lengths").split(",")),
        rounds=ask("rounds"),
        budget=ask("budget"),
        contestants=ask("contestants"),
        threads=ask("threads"),
        ragged_rows=ask("ragged_rows"),
        rows=ask("rows"),
        beyond_l3=ask("beyond_l3"),
        prompt=ask("prompt"),
        new=ask("new"),
        peaks=not ask("no_peaks") and can_measure(),
        write=ask("write"),
        results=Path(ask("results")),
        command="pytest " + " ".join(map(str, pytestconfig.invocation_params.args)),
    )
    torch.set_num_threads(found.threads)
    return found


@pytest.fixture(scope="session")
def folder(wish: Wish) -> str:
    """Where the model's weights are."""
    return str(fetch(wish.model)) if wish.model in PACKAGED else wish.model


@pytest.fixture(params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, folder: str) -> Iterator[Any]:
    """The model, once in each dtype of computation."""
    yield load(folder, getattr(torch, request.param))
    gc.collect()


@pytest.fixture
def model32(folder: str) -> Iterator[Any]:
    """The model in fp32."""
    yield load(folder, torch.float32)
    gc.collect()


def load(folder: str, dtype: torch.dtype) -> Any:
    """The model's weights alone: which tokens are decoded does not matter here."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


Play = Callable[..., list[dict[str, float]]]


@pytest.fixture
def play(benchmark: Any, wish: Wish) -> Play:
    """Rounds in which contestants take turns, as rounds of one benchmark; the first warms up and does not count."""

    def rounds(
        runners: Runners, before: Callable[[str], object] = str, *, rounds: int = wish.rounds
    ) -> list[dict[str, float]]:
        played: list[dict[str, float]] = []
        benchmark.pedantic(
            lambda: played.append(take_turns(runners, len(played), before)), rounds=rounds, warmup_rounds=1
        )
        return played[1:]

    return rounds


Note = Callable[..., None]


@pytest.fixture
def note(benchmark: Any, wish: Wish, pytestconfig: pytest.Config) -> Note:
    """Show what was found, and record it if that was asked for."""

    def leave(name: str, model: Any, found: Mapping[str, Any], shown: Sequence[Any] = ()) -> None:
        facts = {"command": wish.command, "rounds": wish.rounds} | provenance(model) | _sizes(model)
        whole = facts | dict(found) | {"not_measured": not_measured()}
        benchmark.extra_info |= records.rounded(found)
        pytestconfig.stash[_SHOWN] += [name, *(shown or [records.rounded(found)])]
        if wish.write:
            pytestconfig.stash[_SHOWN].append(f"written to {records.write(name, whole, wish.results)}")

    return leave


def _sizes(model: Any) -> dict[str, int | None]:
    """What every step streams beside its cache, and the largest cache of the CPU."""
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in model.parameters()}
    return {"weight_bytes": sum(weights.values()), "l3_bytes": l3_bytes()}


def pytest_terminal_summary(config: pytest.Config) -> None:
    """Print all tables at the end."""
    console = Console(width=150)
    for each in config.stash[_SHOWN]:
        console.print(f"\n[bold]{each}[/bold]" if isinstance(each, str) else each)
