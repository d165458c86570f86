"""The document: the version of its schema, and either a preset with its options or a whole policy."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final, cast

import attrs

from qevict.config.forms import Choice, Scalar
from qevict.config.grammar import Record, annotations_of, form_of, recipe_of
from qevict.config.problems import did_you_mean, gathering, refuse, suggestion
from qevict.config.recipes import Check, Option, Recipe
from qevict.contracts.budget import Fraction
from qevict.policies import PRESETS
from qevict.policy import Policy
from qevict.registry import Registry

SCHEMA: Final = 1
"""The version of the schema that is read and written."""

ROOT: Final = "$"
"""The path of a whole file."""

_PARTS: Final = tuple(field.name for field in attrs.fields(Policy) if field.default is attrs.NOTHING)
_VERSION: Final = Option(
    "schema", Scalar(f"the version of the schema, a whole number: {SCHEMA}", (int,), int), required=True
)
_NAMES: Final = Choice(
    f"the name of a preset ({', '.join(PRESETS)}), or in its place all parts of a policy ({', '.join(_PARTS)})",
    tuple(PRESETS.items()),
)
_PRESET: Final = Option("preset", _NAMES, required=True)


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
    with gathering() as attempt:
        with attempt():
            _refuse_mixture(document)
        with attempt():
            policy = _Document(_recipe(document, registry)).read(document, ROOT)
    return cast("Policy", policy)


def write_document(policy: Policy, registry: Registry) -> dict[str, object]:
    """Make what a file holds: options first, then parts.

    Raises:
        PolicyFileError: with every part and option that a file cannot hold.
    """
    table = Record(Policy, registry).write(policy, ROOT)
    return {"schema": SCHEMA} | {key: table[key] for key in sorted(table, key=_PARTS.__contains__)}


def _recipe(document: Mapping[str, object], registry: Registry) -> Recipe:
    name, parts = document.get("preset"), set(_PARTS).intersection(document)
    if isinstance(name, str) and name in PRESETS and not parts:
        return _Preset(name, registry)
    return recipe_of(Policy, registry) if parts and "preset" not in document else _undecided(registry)


def _refuse_mixture(document: Mapping[str, object]) -> None:
    parts = [part for part in _PARTS if part in document]
    if "preset" in document and parts:
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


class _Preset(Recipe):
    """A preset; its options are the arguments of its function."""

    def __init__(self, name: str, registry: Registry) -> None:
        super().__init__(_call_preset, (_PRESET, *_arguments(PRESETS[name], registry)))
        self._name = name

    def checks(self, values: Mapping[str, object], given: Iterable[str]) -> Iterator[Check]:
        """Where the options do not work together, try each without the others."""
        required = [option.key for option in self.options if option.required and option is not _PRESET]
        # What presets require is a budget; where it is wrong, the options are judged all the same.
        anything = Fraction(1)
        call = partial(PRESETS[self._name], **{key: values.get(key, anything) for key in required})
        others = {
            key: each for key, each in values.items() if key in self.known and key not in {*required, _PRESET.key}
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


def _undecided(registry: Registry) -> Recipe:
    """For a file that names no preset and has no parts, or both: every option there is."""
    options = [option for preset in PRESETS.values() for option in _arguments(preset, registry)]
    options += recipe_of(Policy, registry).options
    known = {option.key: attrs.evolve(option, required=False) for option in options}
    return Recipe(dict, (_PRESET, *known.values()))


def _call_preset(*, preset: Callable[..., Policy], **options: object) -> Policy:
    return preset(**options)


def _arguments(preset: Callable[..., Policy], registry: Registry) -> list[Option]:
    hints = annotations_of(preset)
    return [
        Option(name, form_of(hints.get(name), registry), required=parameter.default is parameter.empty)
        for name, parameter in inspect.signature(preset).parameters.items()
    ]
