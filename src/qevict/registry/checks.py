"""What must hold of what is offered before it is registered; a wrong part must not fail later, inside a forward."""

import inspect
from collections.abc import Iterable
from types import FunctionType

from qevict.errors import ContractError
from qevict.registry.kinds import CONTRACTS, Kind, Offered, PartKind, hook_name, hook_of, path_of
from qevict.registry.presets import checked_preset


def checked(offered: object, kind: Kind) -> Offered:
    """Return the class, or the preset, that was offered.

    Raises:
        ContractError: it is no class, of another kind, abstract, nameless, or a method takes other things; or it is
            no function that can be a preset.
    """
    if kind == "preset":
        return checked_preset(offered)
    part = _class_of_kind(offered, kind)
    _refuse_abstract(part)
    _refuse_nameless(part)
    _refuse_other_arguments(part, CONTRACTS[kind])
    return part


def name_of(offered: object) -> str | None:
    """The name that an object claims, if it is one: what is broken can then be recognised when asked for."""
    name = offered.__name__ if isinstance(offered, FunctionType) else inspect.getattr_static(offered, "name", None)
    return name if isinstance(name, str) else None


def _class_of_kind(offered: object, kind: PartKind) -> type:
    hook, contract = hook_name(kind), CONTRACTS[kind]
    if not isinstance(offered, type):
        preset = f"; presets go through {hook_name('preset')}" if isinstance(offered, FunctionType) else ""
        raise ContractError(f"{hook} returns classes, got {offered!r}; return the class itself{preset}")
    if issubclass(offered, contract):
        return offered
    other = hook_of(offered)
    remedy = f"offer it from {other}" if other else f"derive it from {path_of(contract)}"
    raise ContractError(f"{hook} returns subclasses of {contract.__name__}, got {path_of(offered)}; {remedy}")


def _refuse_abstract(part: type) -> None:
    missing: Iterable[str] = getattr(part, "__abstractmethods__", ())
    if missing:
        raise ContractError(f"{path_of(part)} is abstract; implement {', '.join(sorted(missing))}")


def _refuse_nameless(part: type) -> None:
    name = getattr(part, "name", None)
    if not isinstance(name, str) or not name or name != name.strip():
        raise ContractError(f"{path_of(part)} has name {name!r}; give the class one, such as name = 'key_norm'")


def _refuse_other_arguments(part: type, contract: type) -> None:
    for method, wanted in vars(contract).items():
        given = getattr(part, method, None)
        if getattr(wanted, "__isabstractmethod__", False) and inspect.isfunction(wanted) and callable(given):
            _compare(f"{path_of(part)}.{method}", inspect.signature(wanted), inspect.signature(given))


def _compare(path: str, wanted: inspect.Signature, given: inspect.Signature) -> None:
    parameters = wanted.parameters.values()
    by_name = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    try:
        given.bind(*[None] * (len(parameters) - len(by_name)), **dict.fromkeys(by_name))
    except TypeError as error:
        bare = wanted.replace(
            parameters=[each.replace(annotation=each.empty) for each in parameters], return_annotation=wanted.empty
        )
        raise ContractError(f"{path} is called with {bare}, but: {error}") from error
