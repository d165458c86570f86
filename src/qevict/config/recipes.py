"""Recipes: which keys a table may have, and what is made of them."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, cast

import attrs

from qevict.config.forms import Form
from qevict.config.problems import blame, did_you_mean, gathering, refuse, step, suggestion

_FACTORY: Final = cast("Any", attrs.Factory)  # a class, which is typed as a function

Check = tuple[str, Callable[[], object]]
"""A key, and a function that raises what is wrong with the value of that key."""


@attrs.frozen
class Option:
    """A key that a table may, or must, have."""

    key: str
    form: Form
    required: bool


class Recipe:
    """How a table becomes an object.

    Args:
        build: makes the object; its arguments are the keys.
        options: the keys.
    """

    def __init__(self, build: Callable[..., object], options: Iterable[Option] = ()) -> None:
        self.build = build
        self.options = tuple(options)

    @property
    def known(self) -> list[str]:
        """The keys that the table may have."""
        return [option.key for option in self.options]

    def checks(self, values: Mapping[str, object], given: Iterable[str]) -> Iterator[Check]:
        """Check each value by itself; a check may rely on those before it having run.

        Args:
            values: what could be read.
            given: the keys of the table; those without a value were wrong.
        """
        yield from ()

    def unknown(self, key: str) -> str:
        """Say why a key is refused."""
        return f"unknown key{did_you_mean(key, self.known)}"

    def read(self, table: Mapping[str, object], at: str) -> object:
        """Make the object of a table.

        Raises:
            PolicyFileError: with every problem of every key; with those of the whole once each key is fine.
        """
        values: dict[str, object] = {}
        with gathering() as attempt:
            for option in self.options:
                where = step(at, option.key)
                with attempt(), blame(where):
                    if option.key in table:
                        values[option.key] = option.form.read(table[option.key], where)
            for key, message in self._strays(table):
                with attempt():
                    refuse(step(at, key), message)
            for key, check in self.checks(values, table):
                with attempt(), blame(step(at, key)):
                    check()
        with blame(at):
            return self.build(**values)

    def _strays(self, table: Mapping[str, object]) -> Iterator[tuple[str, str]]:
        """Keys that are missing, and keys that are unknown; a misspelt one is not missing as well."""
        unknown = [key for key in table if key not in self.known]
        meant = {suggestion(key, self.known) for key in unknown}
        for option in self.options:
            if option.required and option.key not in meant.union(table):
                yield option.key, f"missing; expected {option.form.what}"
        for key in unknown:
            yield key, self.unknown(key)


class Fields(Recipe):
    """An attrs class, by its fields.

    Args:
        cls: the class.
        forms: the form of each field that can be given.
    """

    def __init__(self, cls: type, forms: Mapping[str, Form]) -> None:
        self._cls = cls
        self._fields = {field.name: field for field in attrs.fields(cls)}
        self._given = {self._fields[name].alias or name: self._fields[name] for name in forms}
        options = (
            Option(key, forms[field.name], required=field.default is attrs.NOTHING)
            for key, field in self._given.items()
        )
        super().__init__(cls, options)

    def checks(self, values: Mapping[str, object], given: Iterable[str]) -> Iterator[Check]:
        """Convert and validate field by field, on a draft that has only the fields that are fine."""
        draft: object = object.__new__(self._cls)
        for key, field in self._given.items():
            if key in values:
                yield key, partial(_settle, draft, field, values[key])
        for field in self._fields.values():
            if (field.alias or field.name) not in given:
                _settle_default(draft, field)
        for key, field in self._given.items():
            if key in values and field.validator is not None and hasattr(draft, field.name):
                yield key, partial(self._validate, draft, field)

    def write(self, value: object, at: str) -> dict[str, object]:
        """Make the table of an object.

        Raises:
            PolicyFileError: with every field that a file cannot hold.
        """
        table: dict[str, object] = {}
        with gathering() as attempt:
            for option, field in zip(self.options, self._given.values(), strict=True):
                where, each = step(at, option.key), getattr(value, field.name)
                with attempt(), blame(where):
                    if each is not None:
                        table[option.key] = option.form.write(each, where)
                    elif _default(field) is not None:
                        refuse(where, "is None, which TOML cannot say, and to leave it out means something else")
        return table

    def _validate(self, draft: object, field: "attrs.Attribute[object]") -> None:
        assert field.validator is not None
        try:
            field.validator(draft, field, getattr(draft, field.name))
        except AttributeError:
            # It looks at another field, and that one is wrong or missing; which is told already.
            if all(hasattr(draft, name) for name in self._fields):
                raise


def _settle(draft: object, field: "attrs.Attribute[object]", value: object) -> None:
    match field.converter:
        case None:
            pass
        case attrs.Converter() as converter:
            value = converter(value, draft, field)  # type: ignore[operator]
        case converter:
            value = converter(value)
    object.__setattr__(draft, field.name, value)


def _settle_default(draft: object, field: "attrs.Attribute[object]") -> None:
    """Give the draft a default, for the sake of validators that look at it; a real instance checks it."""
    default: Any = field.default
    with contextlib.suppress(Exception):
        if isinstance(default, _FACTORY):
            default = default.factory(draft) if default.takes_self else default.factory()
        if default is not attrs.NOTHING:
            _settle(draft, field, default)


def _default(field: "attrs.Attribute[object]") -> object:
    default: Any = field.default
    if isinstance(default, _FACTORY) and not default.takes_self:
        return default.factory()
    return default
