"""The POLICY argument: a preset's name, or a TOML file."""

import enum
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from qevict.errors import PolicyError

if TYPE_CHECKING:
    import torch

    from qevict.policy import Policy

DEFAULT_BUDGET = "20 %"

PolicyArgument = Annotated[
    str, typer.Argument(metavar="POLICY", help="A preset (full, sinks_recent, evict_only, qevict) or a TOML file.")
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help=f"'20 %', '64 MiB' or '512 tokens'. Presets start from {DEFAULT_BUDGET}; a file keeps its own.",
        show_default=False,
    ),
]


class StoredDtype(enum.StrEnum):
    """What full precision can be stored in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


DtypeOption = Annotated[
    StoredDtype | None, typer.Option("--dtype", help="Store full precision in it.", show_default="the model's")
]
ModelOption = Annotated[
    str, typer.Option("--model", help="'smollm2', 'gemma3-270m', a folder, or a hub id of a causal language model.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


def read_policy(text: str, budget: str | None = None, dtype: StoredDtype | None = None) -> "Policy":
    """The policy that a name or a file stands for, with what the options change.

    Raises:
        PolicyError: no preset has that name, the file cannot be read, or an option is not allowed.
    """
    import qevict
    from qevict.config.problems import did_you_mean
    from qevict.policies import PRESETS

    changes: dict[str, Any] = {} if dtype is None else {"dtype": _dtype(dtype)}
    if text in PRESETS:
        preset = PRESETS[text]
        if "budget" in inspect.signature(preset).parameters:
            changes["budget"] = DEFAULT_BUDGET if budget is None else budget
        elif budget is not None:
            raise PolicyError(f"preset {text!r} has no budget; leave --budget out")
        return preset(**changes)
    if not _is_file(text):
        raise PolicyError(f"no preset is named {text!r}, and files end in .toml{did_you_mean(text, [*PRESETS])}")
    if budget is not None:
        changes["budget"] = budget
    return attrs.evolve(qevict.load(text), **changes)


def _is_file(text: str) -> bool:
    return text.endswith(".toml") or Path(text).is_file()


def _dtype(name: StoredDtype) -> "torch.dtype":
    import torch

    return getattr(torch, name.value)  # type: ignore[no-any-return]
