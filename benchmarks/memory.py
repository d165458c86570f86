"""Peak memory of one job in a process of its own: ``python -m benchmarks.memory '{"job": ...}'``.

The kernel keeps the high-water mark of a process's resident memory (``VmHWM``) and lets it be set back to what is
resident now, so a peak is counted from the loaded model on, and no earlier peak of another job hides it. Linux only.
"""

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import AutoModelForCausalLM

from benchmarks.contestants import arena, by_policy, cheap_to_fill, plans, stock_field
from benchmarks.decoding import decoder
from benchmarks.generating import read, tokens_of
from benchmarks.scoring import scorings
from benchmarks.synthetic import context, fill

ROOT = Path(__file__).parents[1]
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

NOT_TAKEN = "not taken: --no-peaks, or a system without /proc"

_WARM_TOKENS = 24
"""A small job before, so that code and tables which every contestant loads once do not count."""

_RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Makes the C library hand freed memory back at once, so that no job lives on what an earlier one left behind."""


@attrs.frozen(kw_only=True)
class Job:
    """What is done while the peak is watched.

    Attributes:
        job: ``"generate"``, ``"score"`` or ``"decode"``.
        folder: where the model's weights are.
        dtype: of the model.
        name: contestant, or scoring.
        budget: of the compressing policies.
        threads: CPU threads.
        rows: of the batch.
        tokens: of the prompt.
        new: tokens to generate.
    """

    job: str
    folder: str
    dtype: str
    name: str
    budget: str
    threads: int
    rows: int
    tokens: int
    new: int


def can_measure() -> bool:
    """This system keeps a high-water mark that can be set back."""
    return _CLEAR.exists() and "VmHWM" in _STATUS.read_text()


def peak_bytes(job: Job) -> int:
    """Bytes beyond what was resident before the job, in a fresh process."""
    argv = [sys.executable, "-m", "benchmarks.memory", json.dumps(attrs.asdict(job))]
    done = subprocess.run(argv, cwd=ROOT, env=os.environ | _RETURN_FREED, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that measures {job.name} failed:\n{done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def _resident(which: str) -> int:
    found = re.search(rf"^{which}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _peak_of(run: Callable[[], object]) -> int:
    gc.collect()
    _CLEAR.write_text("5")
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def _generate(model: Any, job: Job) -> int:
    field = stock_field() | {name: by_policy(plan) for name, plan in plans(job.budget, model.dtype).items()}
    with arena(model, field) as switch:
        switch(job.name)

        def run(tokens: int, new: int) -> None:
            cache = field[job.name].make(model)
            read(model, cache, tokens_of(model, job.rows, tokens))
            decoder(model, cache, [tokens] * job.rows, new)()

        run(_WARM_TOKENS, _WARM_TOKENS)
        return _peak_of(lambda: run(job.tokens, job.new))


def _score(model: Any, job: Job) -> int:
    contestant = by_policy(scorings(job.budget)[job.name])
    with arena(model, {job.name: contestant}) as switch:
        switch(job.name)
        fill(contestant.make(model), context(model, [_WARM_TOKENS]))
        recording = context(model, [job.tokens] * job.rows)
        return _peak_of(lambda: fill(contestant.make(model), recording))


def _decode(model: Any, job: Job) -> int:
    """Beyond the model: what decoding takes behind a context that is there already, the cache with it."""
    field = stock_field() | {
        name: by_policy(cheap_to_fill(plan)) for name, plan in plans(job.budget, model.dtype).items()
    }
    with arena(model, field) as switch:
        switch(job.name)

        def held(tokens: int) -> Any:
            cache = field[job.name].make(model)
            fill(cache, context(model, [tokens]))
            return cache

        decoder(model, held(_WARM_TOKENS), [_WARM_TOKENS])()
        before = _resident("VmRSS")
        run = decoder(model, held(job.tokens), [job.tokens], job.new)
        gc.collect()
        behind = _resident("VmRSS")
        return behind - before + _peak_of(run)


def main(text: str) -> None:
    """Do one job and print its peak."""
    job = Job(**json.loads(text))
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=getattr(torch, job.dtype)).eval()
    for tensor in model.parameters():
        tensor.data = tensor.clone()  # weights mapped from a file become resident at their first use, not at loading
    print({"generate": _generate, "score": _score, "decode": _decode}[job.job](model, job))


if __name__ == "__main__":
    main(sys.argv[1])
