"""Forms: the ways in which a value can stand in a file. Each reads what it writes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import attrs

from qevict.config.problems import blame, did_you_mean, gathering, refuse, shown, step
from qevict.contracts.budget import Budget, Bytes, Fraction, parse_budget
from qevict.errors import PolicyFileError, Problem


class Form(ABC):
    """What an annotation means in a file.

    Laws:
        * ``read(write(value))`` equals ``value``, or one of the two is refused.
        * All problems below a path are told together, each at its own path.
    """

    @property
    @abstractmethod
    def what(self) -> str:
        """What is expected, for messages."""

    @abstractmethod
    def read(self, raw: object, at: str) -> object:
        """Make the value.

        Raises:
            PolicyFileError: what stands at that path is something else.
        """

    @abstractmethod
    def write(self, value: object, at: str) -> object:
        """Make what stands in the file.

        Raises:
            PolicyFileError: the value is of another type, or a file cannot hold it.
        """

    def wrong(self, given: object, at: str, more: str = "") -> PolicyFileError:
        """The error for what is not this form."""
        return PolicyFileError([Problem(at, f"expected {self.what}, got {shown(given)}{more}")])


@attrs.frozen
class Scalar(Form):
    """A plain TOML value; a bool is no number, and an int is a number."""

    what: str
    types: tuple[type, ...]
    build: Callable[[Any], object]

    def read(self, raw: object, at: str) -> object:
        if not isinstance(raw, self.types) or (isinstance(raw, bool) and bool not in self.types):
            raise self.wrong(raw, at)
        with blame(at):
            return self.build(raw)

    def write(self, value: object, at: str) -> object:
        return self.read(value, at)


@attrs.frozen
class Choice(Form):
    """One of some values, each with the word for it."""

    what: str
    values: tuple[tuple[object, object], ...]

    def read(self, raw: object, at: str) -> object:
        for word, value in self.values:
            if type(word) is type(raw) and word == raw:
                return value
        words = [word for word, _ in self.values if isinstance(word, str)]
        raise self.wrong(raw, at, did_you_mean(raw, words) if isinstance(raw, str) else "")

    def write(self, value: object, at: str) -> object:
        for word, each in self.values:
            if type(each) is type(value) and each == value:
                return word
        raise self.wrong(value, at)


@attrs.frozen
class BudgetText(Form):
    """A budget, as text with its unit."""

    what: str = 'a budget such as "20 %", "64 MiB" or "512 tokens"'

    def read(self, raw: object, at: str) -> object:
        if not isinstance(raw, str):
            raise self.wrong(raw, at)
        with blame(at):
            return parse_budget(raw)

    def write(self, value: object, at: str) -> object:
        if not isinstance(value, Budget):
            raise self.wrong(value, at)
        return next(text for text in _texts(value) if parse_budget(text) == value)


def _texts(budget: Budget) -> Iterator[str]:
    """Texts for a budget, the most readable first; the last one is exact."""
    if isinstance(budget, Bytes):
        units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
        yield from (f"{budget.count // unit} {name}" for name, unit in units if budget.count % unit == 0)
    yield str(budget)
    if isinstance(budget, Fraction):
        yield f"{budget.share * 100} %"
        yield repr(float(budget.share))


@attrs.frozen
class Array(Form):
    """An array: of any number of elements of one form, or of as many as there are forms."""

    build: Callable[[Iterable[object]], object]
    element: Form | None = None
    elements: tuple[Form, ...] = ()

    @property
    def what(self) -> str:
        return "an array" if self.element else f"an array of {len(self.elements)} elements"

    def read(self, raw: object, at: str) -> object:
        if not isinstance(raw, list):
            raise self.wrong(raw, at, "; [[double brackets]] make a table an element" if isinstance(raw, dict) else "")
        read = self._each(raw, at, lambda form, each, where: form.read(each, where))
        with blame(at):
            return self.build(read)

    def write(self, value: object, at: str) -> object:
        if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
            raise self.wrong(value, at)
        written = self._each(value, at, lambda form, each, where: form.write(each, where))
        return sorted(written, key=repr) if isinstance(value, set | frozenset) else written

    def _each(self, given: Collection[object], at: str, do: Callable[[Form, object, str], object]) -> list[object]:
        forms = [self.element] * len(given) if self.element else [*self.elements]
        if len(forms) != len(given):
            refuse(at, f"expected {self.what}, got {len(given)}")
        done = []
        with gathering() as attempt:
            for index, (form, each) in enumerate(zip(forms, given, strict=True)):
                with attempt():
                    done.append(do(form, each, f"{at}[{index}]"))
        return done


@attrs.frozen
class Table(Form):
    """A table with any keys, all of one form."""

    key: Form
    value: Form
    what: str = "a table"

    def read(self, raw: object, at: str) -> object:
        if not isinstance(raw, dict):
            raise self.wrong(raw, at)
        read = {}
        with gathering() as attempt:
            for key, each in raw.items():
                with attempt():
                    read[self.key.read(key, step(at, key))] = self.value.read(each, step(at, key))
        return read

    def write(self, value: object, at: str) -> object:
        if not isinstance(value, Mapping):
            raise self.wrong(value, at)
        written = {}
        with gathering() as attempt:
            for key, each in value.items():
                where = step(at, str(key))
                with attempt():
                    written[self._word(key, where)] = self.value.write(each, where)
        return dict(sorted(written.items()))

    def _word(self, key: object, at: str) -> str:
        word = self.key.write(key, at)
        if not isinstance(word, str):
            refuse(at, f"the keys of a table are strings, got {shown(word)}")
        return word


@attrs.frozen
class OneOf(Form):
    """The first of several forms that fits."""

    forms: tuple[Form, ...]

    @property
    def what(self) -> str:
        return " or ".join(dict.fromkeys(form.what for form in self.forms))

    def read(self, raw: object, at: str) -> object:
        return self._first(raw, at, lambda form: form.read(raw, at))

    def write(self, value: object, at: str) -> object:
        return self._first(value, at, lambda form: form.write(value, at))

    def _first(self, given: object, at: str, attempt: Callable[[Form], object]) -> object:
        inside = []
        for form in self.forms:
            try:
                return attempt(form)
            except PolicyFileError as error:
                # A form that was right about the outside knows best what is wrong inside.
                inside += [error] if any(problem.path != at for problem in error.problems) else []
        raise inside[0] if inside else self.wrong(given, at)


@attrs.frozen
class Opaque(Form):
    """What a file cannot hold."""

    annotation: str

    @property
    def what(self) -> str:
        return f"a {self.annotation}, which a file cannot hold; compose this policy in Python"

    def read(self, raw: object, at: str) -> object:
        refuse(at, f"is {self.what}")

    def write(self, value: object, at: str) -> object:
        refuse(at, f"is a {self.annotation}, which a file cannot hold")
