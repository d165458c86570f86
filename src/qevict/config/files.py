"""Reading and writing policy files."""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from qevict.config.document import ROOT, read_document, write_document
from qevict.config.problems import blame, gathering, refuse, step
from qevict.errors import PolicyFileError
from qevict.policy import Policy
from qevict.registry import Registry, default_registry


def load(path: str | os.PathLike[str], *, registry: Registry | None = None) -> Policy:
    """Read a policy from a TOML file.

    Args:
        path: the file, in UTF-8.
        registry: where the names in it are looked up; None for the built-in parts and all installed plugins.

    Raises:
        PolicyFileError: the file cannot be read, is no TOML or no policy; with all its problems and where they are.
    """
    try:
        return loads(_text(Path(path)), registry=registry)
    except PolicyFileError as error:
        raise PolicyFileError(error.problems, os.fspath(path)) from None


def loads(text: str, *, registry: Registry | None = None) -> Policy:
    """Read a policy from TOML text.

    Args:
        text: what a file would hold.
        registry: where the names in it are looked up; None for the built-in parts and all installed plugins.

    Raises:
        PolicyFileError: the text is no TOML or no policy; with all its problems and where they are.
    """
    with blame(ROOT):
        return read_document(_parsed(text), registry or default_registry())


def dumps(policy: Policy, *, registry: Registry | None = None) -> str:
    """Write a policy as TOML text, with every option that it has; ``loads`` makes an equal policy of it.

    Args:
        policy: all of its parts are registered.
        registry: where the names of the parts are looked up; None for the built-in parts and all installed plugins.

    Raises:
        PolicyFileError: a part is not registered, or has an option that a file cannot hold.
    """
    registry = registry or default_registry()
    with blame(ROOT):
        text = tomli_w.dumps(write_document(policy, registry))
        _refuse_differences(policy, loads(text, registry=registry))
    return text


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        refuse(ROOT, f"is not UTF-8: {error.reason} at byte {error.start}; save the file as UTF-8")
    except (OSError, ValueError) as error:  # a ValueError for a path that no system takes
        refuse(ROOT, f"cannot be read: {getattr(error, 'strerror', None) or error}")


def _parsed(text: str) -> dict[str, object]:
    if not isinstance(text, str):
        refuse(ROOT, f"is a {type(text).__name__}; loads takes text, load takes a path")
    try:
        return tomllib.loads(text)
    except RecursionError:
        refuse(ROOT, "is not TOML that can be read: it is nested too deeply")
    except ValueError as error:  # a number of many thousand digits raises a plain one
        refuse(ROOT, f"is not TOML: {error}")


def _refuse_differences(policy: Policy, again: Policy) -> None:
    with gathering() as attempt:
        for path in _differences(policy, again, ROOT):
            with attempt():
                refuse(path, "would be read back as something else; compose this policy in Python")


def _differences(left: object, right: object, at: str) -> Iterator[str]:
    """The paths at which two policies differ."""
    cls: Any = type(left)
    if cls is type(right) and attrs.has(cls):
        for field in attrs.fields(cls):
            if field.eq:
                ours, theirs = _compared(field, left), _compared(field, right)
                yield from _differences(ours, theirs, step(at, field.alias or field.name))
    elif isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from _differences(one, other, f"{at}[{index}]")
    elif left != right and not (cls is type(right) and cls.__eq__ is object.__eq__):
        yield at  # what has no equality of its own was compared by its state when it was written


def _compared(field: "attrs.Attribute[object]", owner: object) -> object:
    value = getattr(owner, field.name)
    key = getattr(field, "eq_key", None)
    return key(value) if key else value
