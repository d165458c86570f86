"""The POLICY argument: a preset's name, or a TOML file."""

import enum
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from qevict.errors import PolicyError, UnknownPartError

if TYPE_CHECKING:
    import torch

    from qevict.policy import Policy
    from qevict.registry import Preset

DEFAULT_BUDGET = "20 %"

_POLICY = (
    "A preset (full, sinks_recent, evict_only, qevict, four_tiers), a plugin's (`qevict plugins`), or a TOML file."
)
PolicyArgument = Annotated[str, typer.Argument(metavar="POLICY", help=_POLICY)]
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
        PolicyError: the file cannot be read, or an option is not allowed.
        UnknownPartError: no preset has that name, and there is no such file.
        PluginError: the plugin that offers the preset could not be loaded.
    """
    import qevict

    changes: dict[str, Any] = {} if dtype is None else {"dtype": _dtype(dtype)}
    if preset := _find_preset(text):
        return attrs.evolve(_compose(preset, budget), **changes)
    if budget is not None:
        changes["budget"] = budget
    return attrs.evolve(qevict.load(text), **changes)


def _find_preset(text: str) -> "Preset | None":
    """The preset of that name; None for a file."""
    from qevict.registry import default_registry

    if text.endswith(".toml"):
        return None
    try:
        return default_registry().get("preset", text)
    except UnknownPartError as error:
        if Path(text).is_file():
            return None
        raise UnknownPartError(f"{error}\n  files of policies end in .toml") from error


def _compose(preset: "Preset", budget: str | None) -> "Policy":
    from qevict.registry.presets import policy_of

    name, parameters = preset.__name__, inspect.signature(preset).parameters
    others = [each.name for each in parameters.values() if each.default is each.empty and each.name != "budget"]
    if others:
        raise PolicyError(f"preset {name!r} also needs {', '.join(others)}: say so in a TOML file, and name that file")
    if "budget" in parameters:
        return policy_of(preset, budget=DEFAULT_BUDGET if budget is None else budget)
    if budget is not None:
        raise PolicyError(f"preset {name!r} has no budget; leave --budget out")
    return policy_of(preset)


def _dtype(name: StoredDtype) -> "torch.dtype":
    import torch

    return getattr(torch, name.value)  # type: ignore[no-any-return]
