"""``qevict generate``: text under a policy, and the report of its cache."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qevict.cli.console import console, progress
from qevict.cli.policies import BudgetOption, DtypeOption, JsonOption, ModelOption, PolicyArgument, read_policy
from qevict.errors import InputError

if TYPE_CHECKING:
    from qevict.engine.report import Report
    from qevict.policy import Policy


def _usable(temperature: float) -> float:
    if 0 < temperature < 0.01:
        raise typer.BadParameter("temperatures below 0.01 overflow; 0 is greedy")
    return temperature


def generate(
    policy: PolicyArgument,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="What to say; '-' reads standard input.")
    ] = None,
    *,
    context: Annotated[
        Path | None,
        typer.Option("--context", help="A text file, read and compressed before the prompt.", show_default="none"),
    ] = None,
    model: ModelOption = "smollm2",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", min=0.0, callback=_usable, help="From 0.01: sample at that temperature; 0: greedy."
        ),
    ] = 0.0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    budget: BudgetOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Generate text under a policy and report what its cache holds.

    The text goes to standard output as it comes, the report to standard error. With --context, the context is
    compressed before the prompt is seen.
    """
    chosen = read_policy(policy, budget, dtype)
    message = _read_prompt(prompt)
    document = None if context is None else _read_file(context)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    from qevict.bench.models import load, quiet_libraries
    from qevict.bench.prompts import generation_ids, stream

    quiet_libraries()
    with progress(1) as tick:
        loaded, tokenizer = load(model, progress=tick)
    first, rest = generation_ids(tokenizer, document, message, raw=raw)
    wishes = {"max_new_tokens": max_new_tokens, "streamer": None if as_json else stream(tokenizer), **sampling}
    new, report = _run(loaded, chosen, first, rest, wishes)
    if as_json:
        text = tokenizer.decode(new, skip_special_tokens=True)
        typer.echo(json.dumps({"text": text, "report": report.as_dict()}, indent=2))
    else:
        console(stderr=True).print(report)


def _run(
    model: Any, policy: "Policy", first: list[int], rest: list[int], wishes: dict[str, Any]
) -> "tuple[list[int], Report]":
    """The new tokens, and what the cache holds after them."""
    import torch

    import qevict

    with qevict.attach(model, policy) as session:
        cache = session.prefill(torch.tensor([first], device=model.device)) if first else session.cache()
        out = session.generate(torch.tensor([rest], device=model.device), cache=cache, **wishes)
        return out[0, len(rest) :].tolist(), cache.report()


def _read_prompt(prompt: str | None) -> str:
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = sys.stdin.read()
    if prompt is None or not prompt.strip():
        raise InputError("there is no prompt: give one as an argument, or pipe it in")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise InputError("the prompt is not text in UTF-8; convert it first")
    return prompt


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read --context {path}: {error}") from error
