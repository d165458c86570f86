"""The grammar of files: from annotations to forms, and from names to parts."""

import contextlib
import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from functools import reduce
from operator import or_
from typing import Final

import attrs
import torch

from qevict.config.forms import Array, BudgetText, Choice, Form, OneOf, Opaque, Scalar, Table
from qevict.config.problems import blame, refuse, shown, step
from qevict.config.recipes import Fields, Recipe
from qevict.contracts.budget import Budget
from qevict.errors import UnknownPartError
from qevict.registry import Registry
from qevict.registry.kinds import CONTRACTS, PartKind, hook_name, path_of


def form_of(hint: object, registry: Registry) -> Form:
    """The form of what is annotated so; :class:`Opaque` where a file has none."""
    for rule in (_leaf, _union, _words, _array, _table, _part, _record):
        if form := rule(hint, registry):
            return form
    return Opaque("value without annotation" if hint is None else inspect.formatannotation(hint))


def annotations_of(owner: Callable[..., object]) -> Mapping[str, object]:
    """The annotations of a class or function, without those that name what only a type checker knows."""
    found: dict[str, object] = {}
    for each in reversed(inspect.getmro(owner)) if isinstance(owner, type) else (owner,):
        for name, annotation in inspect.get_annotations(each).items():
            with contextlib.suppress(Exception):
                found[name] = _resolved(annotation, each)
    return found


def _resolved(annotation: object, owner: object) -> object:
    """Evaluate an annotation that is text, alone, so that no other one can spoil it."""
    alone = types.SimpleNamespace(__annotations__={"it": annotation})
    return typing.get_type_hints(alone, dict(vars(owner)), vars(sys.modules[owner.__module__]))["it"]


def recipe_of(cls: type, registry: Registry) -> Fields:
    """The recipe of an attrs class."""
    hints = annotations_of(cls)
    forms = {
        field.name: form_of(hints.get(field.name, field.type), registry) for field in attrs.fields(cls) if field.init
    }
    return Fields(cls, forms)


@attrs.frozen
class Record(Form):
    """A table for an attrs class."""

    cls: type
    registry: Registry

    @property
    def what(self) -> str:
        return "a table"

    def read(self, raw: object, at: str) -> object:
        if not isinstance(raw, dict):
            raise self.wrong(raw, at)
        return recipe_of(self.cls, self.registry).read(raw, at)

    def write(self, value: object, at: str) -> dict[str, object]:
        if type(value) is not self.cls:
            refuse(at, f"is a {path_of(type(value))}; only a {path_of(self.cls)} itself can stand here")
        return recipe_of(self.cls, self.registry).write(value, at)


@attrs.frozen
class Part(Form):
    """A part by its registered name: the name alone, or a table of it and the part's options."""

    kind: PartKind
    contract: type
    registry: Registry

    @property
    def what(self) -> str:
        return f"the name of a {self.kind}, or a table with its name and options"

    def read(self, raw: object, at: str) -> object:
        if isinstance(raw, str):
            return self._recipe(raw, at).read({}, at)
        if not isinstance(raw, dict):
            raise self.wrong(raw, at)
        named_at = step(at, "name")
        if "name" not in raw:
            refuse(named_at, f"missing; expected the name of a {self.kind}")
        name = _STRING.read(raw["name"], named_at)
        options = {key: each for key, each in raw.items() if key != "name"}
        return self._recipe(str(name), named_at).read(options, at)

    def write(self, value: object, at: str) -> object:
        cls = type(value)
        name = self._registered_name(cls, at)
        if not attrs.has(cls):
            _refuse_state(value, at)
            return name
        options = recipe_of(cls, self.registry).write(value, at)
        return {"name": name, **options} if options else name

    def _recipe(self, name: str, at: str) -> Recipe:
        with blame(at):
            cls = self.registry.get(self.kind, name)
        if not issubclass(cls, self.contract):
            refuse(at, f"{self.kind} {name!r} is a {path_of(cls)}, not a {path_of(self.contract)}")
        return recipe_of(cls, self.registry) if attrs.has(cls) else _Plain(cls)

    def _registered_name(self, cls: type, at: str) -> str:
        if not issubclass(cls, self.contract):
            refuse(at, f"expected a {self.kind}, got a {path_of(cls)}")
        name = str(getattr(cls, "name", ""))
        owner: type | None = None
        with blame(at), contextlib.suppress(UnknownPartError):
            owner = self.registry.get(self.kind, name)
        if owner is not cls:
            whose = f"that name belongs to {path_of(owner)}" if owner else "it exists in Python only"
            refuse(
                at,
                f"{path_of(cls)} is not registered as {self.kind} {name!r}: {whose}, and a file knows parts by name; "
                f"offer the class from a plugin (hook {hook_name(self.kind)}) under a name of its own",
            )
        return name


class _Plain(Recipe):
    """A part that is no attrs class: what it could be told is not known, so it is made without arguments."""

    def unknown(self, key: str) -> str:
        return "unknown key; this part takes no options from a file, since its class is not made by attrs"


def _refuse_state(part: object, at: str) -> None:
    """Refuse an instance that a class without options would not make again."""
    with blame(at):
        alike = bool(object.__getstate__(part) == object.__getstate__(type(part)()))
    if not alike:
        refuse(at, f"{path_of(type(part))} has options that a file cannot hold: its class is not made by attrs")


# ── Rules: each gives the form of the annotations that it knows, and None for others ──────────────

_STRING: Final = Scalar("a string", (str,), str.__str__)
_DTYPES: Final = tuple(
    (name, each) for name, each in vars(torch).items() if isinstance(each, torch.dtype) and str(each) == f"torch.{name}"
)
_LEAVES: Final[tuple[tuple[object, Form], ...]] = (
    (bool, Scalar("true or false", (bool,), bool)),
    (int, Scalar("a whole number", (int,), int)),
    (float, Scalar("a number", (int, float), float)),
    (str, _STRING),
    (torch.dtype, Choice('a dtype of torch such as "float32", "bfloat16" or "float16"', _DTYPES)),
    (Budget, BudgetText()),
    (Budget | str, BudgetText()),
)
_ARRAYS: Final[Mapping[object, Callable[[Iterable[object]], object]]] = {
    tuple: tuple,
    list: list,
    set: set,
    frozenset: frozenset,
    Sequence: tuple,
    Collection: tuple,
    Iterable: tuple,
    AbstractSet: frozenset,
}


def _leaf(hint: object, _registry: Registry) -> Form | None:
    return next((form for known, form in _LEAVES if known == hint), None)


def _union(hint: object, registry: Registry) -> Form | None:
    if typing.get_origin(hint) not in {typing.Union, types.UnionType}:
        return None
    # None is what a file says by leaving the key out. A whole number is tried before a number that takes it.
    members = [each for each in typing.get_args(hint) if each is not types.NoneType]
    members.sort(key=lambda each: each is float)
    if len(members) == 1:
        return form_of(members[0], registry)
    return _leaf(reduce(or_, members), registry) or OneOf(tuple(form_of(each, registry) for each in members))


def _words(hint: object, _registry: Registry) -> Form | None:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        values: tuple[object, ...] = tuple(hint)
    elif typing.get_origin(hint) is typing.Literal:
        values = tuple(each for each in typing.get_args(hint) if each is not None)
    else:
        return None
    words = tuple((_word(each), each) for each in values)
    return Choice(f"one of {', '.join(shown(word) for word, _ in words)}", words)


def _word(value: object) -> object:
    """An enum's members go by their values where all of these are text, by their names else."""
    if not isinstance(value, enum.Enum):
        return value
    return value.value if all(isinstance(each.value, str) for each in type(value)) else value.name


def _array(hint: object, registry: Registry) -> Form | None:
    build, arguments = _ARRAYS.get(typing.get_origin(hint)), typing.get_args(hint)
    if build is None or not arguments:
        return None
    if build is tuple and len(arguments) != 1 and arguments[-1] is not ...:
        return Array(tuple, elements=tuple(form_of(each, registry) for each in arguments))
    return Array(build, element=form_of(arguments[0], registry))


def _table(hint: object, registry: Registry) -> Form | None:
    if typing.get_origin(hint) not in {dict, Mapping, MutableMapping} or not typing.get_args(hint):
        return None
    key, value = typing.get_args(hint)
    return Table(form_of(key, registry), form_of(value, registry))


def _part(hint: object, registry: Registry) -> Form | None:
    if not (isinstance(hint, type) and inspect.isabstract(hint)):
        return None
    return next((Part(kind, hint, registry) for kind, each in CONTRACTS.items() if issubclass(hint, each)), None)


def _record(hint: object, registry: Registry) -> Form | None:
    return Record(hint, registry) if isinstance(hint, type) and attrs.has(hint) else None
