"""The document: the version of its schema, and either a preset with its options or a whole policy."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final, cast

import attrs

from qevict.config.forms import BudgetText, Form, OneOf, Scalar
from qevict.config.grammar import Record, annotations_of, form_of, recipe_of
from qevict.config.problems import blame, did_you_mean, gathering, refuse, suggestion
from qevict.config.recipes import Check, Option, Recipe
from qevict.contracts.budget import Fraction
from qevict.errors import QevictError
from qevict.policy import Policy
from qevict.registry import Preset, Registry
from qevict.registry.presets import policy_of

SCHEMA: Final = 1
"""The version of the schema that is read and written."""

ROOT: Final = "$"
"""The path of a whole file."""

_PARTS: Final = tuple(field.name for field in attrs.fields(Policy) if field.default is attrs.NOTHING)
_VERSION: Final = Option(
    "schema", Scalar(f"the version of the schema, a whole number: {SCHEMA}", (int,), int), required=True
)


def read_document(document: Mapping[str, object], registry: Registry) -> Policy:
    """Make the policy of a parsed file.

    Raises:
        PolicyFileError: with everything that is wrong.
    """
    version = document.get("schema")
    if type(version) is int and version != SCHEMA:
        refuse(
            f"{ROOT}.schema",
            f"version {version} is not supported, this qevict reads {SCHEMA}; "
            f"take a qevict that reads it, or write the file anew with schema = {SCHEMA}",
        )
    preset = _preset_of(document, registry)
    with gathering() as attempt:
        with attempt():
            _refuse_mixture(document, preset)
        with attempt():
            policy = _Document(_recipe(document, preset, registry)).read(document, ROOT)
    return cast("Policy", policy)


def write_document(policy: Policy, registry: Registry) -> dict[str, object]:
    """Make what a file holds: options first, then parts.

    Raises:
        PolicyFileError: with every part and option that a file cannot hold.
    """
    table = Record(Policy, registry).write(policy, ROOT)
    return {"schema": SCHEMA} | {key: table[key] for key in sorted(table, key=_PARTS.__contains__)}


def _preset_of(document: Mapping[str, object], registry: Registry) -> Preset | None:
    """The preset that a file names; None for none, and for one that cannot be had, which reading the name tells."""
    name = document.get("preset")
    with contextlib.suppress(QevictError):
        return registry.get("preset", name) if isinstance(name, str) else None
    return None


def _recipe(document: Mapping[str, object], preset: Preset | None, registry: Registry) -> Recipe:
    if preset is not None and not _mixed(document, preset):
        return _Preset(preset, registry)
    whole = "preset" not in document and not set(_PARTS).isdisjoint(document)
    return recipe_of(Policy, registry) if whole else _undecided(registry)


def _mixed(document: Mapping[str, object], preset: Preset) -> list[str]:
    """The parts that a file gives beside a preset that does not take them."""
    taken = inspect.signature(preset).parameters
    return [part for part in _PARTS if part in document and part not in taken]


def _refuse_mixture(document: Mapping[str, object], preset: Preset | None) -> None:
    if preset is not None and (parts := _mixed(document, preset)):
        these = ", ".join(parts)
        refuse(f"{ROOT}.preset", f"a preset brings its own parts and cannot be mixed with {these}; remove it, or these")


class _Document(Recipe):
    """What the inner recipe makes, from a table that also says which schema it follows."""

    def __init__(self, inner: Recipe) -> None:
        super().__init__(self._build_inner, (_VERSION, *inner.options))
        self._inner = inner

    def checks(self, values: Mapping[str, object], given: Iterable[str]) -> Iterator[Check]:
        return self._inner.checks(values, given)

    def unknown(self, key: str) -> str:
        return super().unknown(key) if suggestion(key, [_VERSION.key]) else self._inner.unknown(key)

    def _build_inner(self, *, schema: object, **values: object) -> object:
        return self._inner.build(**values)


@attrs.frozen
class _PresetName(Form):
    """A preset by its name."""

    registry: Registry

    @property
    def what(self) -> str:
        presets, parts = ", ".join(_presets(self.registry)), ", ".join(_PARTS)
        return f"the name of a preset ({presets}), or in its place all parts of a policy ({parts})"

    def read(self, raw: object, at: str) -> object:
        if not isinstance(raw, str):
            raise self.wrong(raw, at)
        with blame(at):
            return self.registry.get("preset", raw)

    def write(self, value: object, at: str) -> object:
        refuse(at, "is a preset; what is written is the policy that it returns")


class _Preset(Recipe):
    """A preset; its options are the arguments of its function."""

    def __init__(self, preset: Preset, registry: Registry) -> None:
        self._preset = preset
        self._arguments = _arguments(preset, registry)
        super().__init__(policy_of, (_named_preset(registry), *self._arguments))

    def checks(self, values: Mapping[str, object], given: Iterable[str]) -> Iterator[Check]:
        """Where the options do not work together, try each without the others."""
        required = [option for option in self._arguments if option.required]
        # Where a budget is wrong, the options are judged all the same; nothing else can be stood in for.
        if any(option.key not in values and option.form != BudgetText() for option in required):
            return
        call = partial(self._preset, **{option.key: values.get(option.key, Fraction(1)) for option in required})
        others = {
            option.key: values[option.key] for option in self._arguments if not option.required and option.key in values
        }
        with contextlib.suppress(Exception):
            call(**others)
            return
        for key, each in others.items():
            yield key, partial(call, **{key: each})

    def unknown(self, key: str) -> str:
        if key in {field.name for field in attrs.fields(Policy)}:
            whole = f"`qevict show {self._name} --toml` writes a whole policy to edit"
            return f"preset {self._name!r} leaves it as it is; {whole}"
        return f"preset {self._name!r} has no such option{did_you_mean(key, self.known)}"

    @property
    def _name(self) -> str:
        return str(self._preset.__name__)


def _undecided(registry: Registry) -> Recipe:
    """For a file that names no preset and has no parts, or both: every option there is."""
    options = [option for name in _presets(registry) for option in _arguments(registry.get("preset", name), registry)]
    forms: dict[str, list[Form]] = {}
    for option in [*options, *recipe_of(Policy, registry).options]:
        known = forms.setdefault(option.key, [])
        known += [option.form] if option.form not in known else []
    every = (
        Option(key, known[0] if len(known) == 1 else OneOf(tuple(known)), required=False)
        for key, known in forms.items()
    )
    return Recipe(dict, (_named_preset(registry), *every))


def _presets(registry: Registry) -> list[str]:
    return [each.name for each in registry.inventory().parts if each.kind == "preset"]


def _named_preset(registry: Registry) -> Option:
    return Option("preset", _PresetName(registry), required=True)


def _arguments(preset: Preset, registry: Registry) -> list[Option]:
    hints = annotations_of(preset)
    return [
        Option(name, form_of(hints.get(name), registry), required=parameter.default is parameter.empty)
        for name, parameter in inspect.signature(preset).parameters.items()
    ]
