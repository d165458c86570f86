"""Everything that is there, everything that is not, and how to say so."""

import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import attrs

from qevict.errors import DuplicatePartError, PluginError, UnknownPartError
from qevict.registry.kinds import KINDS, Kind, Offered
from qevict.registry.loading import Failure, Haul, Offer, Source
from qevict.registry.switches import DISABLE, same_name


@attrs.frozen
class Inventory:
    """The outcome of loading all plugins.

    Attributes:
        parts: usable parts and presets, by kind and name.
        failures: what could not be loaded, and the losers of clashes.
        disabled: plugins that the environment keeps out.
        clashes: the message for each name that several distributions offer.
    """

    parts: tuple[Offer, ...]
    failures: tuple[Failure, ...]
    disabled: tuple[Source, ...] = ()
    clashes: Mapping[tuple[Kind, str], str] = attrs.field(factory=dict)

    def find(self, kind: Kind, name: str) -> Offered | None:
        """The class, or preset, of that name, if there is exactly one."""
        return next((each.part for each in self.parts if (each.kind, each.name) == (kind, name)), None)

    def explain_miss(self, kind: Kind, name: str) -> NoReturn:
        """Say why there is no such part or preset, and what could be meant.

        Raises:
            DuplicatePartError: several distributions offer it.
            PluginError: the plugin that offers it, or has that name, failed to load.
            UnknownPartError: otherwise.
        """
        if clash := self.clashes.get((kind, name)):
            raise DuplicatePartError(clash)
        if culprits := [each for each in self.failures if _could_be(each, kind, name)]:
            reasons = "\n  ".join(map(str, culprits))
            raise PluginError(
                f"{kind} {name!r} cannot be had:\n  {reasons}\n  repair or uninstall what failed; "
                "QEVICT_TRACE_PLUGINS=1 shows the traceback"
            )
        raise UnknownPartError("\n  ".join([f"no {kind} is named {name!r}", *self._hints(kind, name)]))

    def _hints(self, kind: Kind, name: str) -> Iterable[str]:
        known = [each.name for each in self.parts if each.kind == kind]
        if near := difflib.get_close_matches(name, known, cutoff=0.5):
            yield f"did you mean {' or '.join(map(repr, near))}?"
        for each in self.parts:
            if each.name == name:
                yield f"{name!r} is a {each.kind}"
        yield f"known: {', '.join(known) or 'none'}"
        yield from map(str, self.failures)
        for source in self.disabled:
            yield f"plugin {source.plugin} is disabled by {DISABLE}"
        yield "`qevict plugins` shows what is installed"


def settle(haul: Haul, disabled: Sequence[Source] = ()) -> Inventory:
    """Give each name to the one who offers it.

    A name that two third parties offer goes to neither. A built-in keeps its name: nobody else can make it
    unusable, and what its name means does not depend on what was loaded before.
    """
    parts, clashes = [], {}
    for (kind, name), rivals in _by_name(haul.offers).items():
        owner = _owner(rivals)
        parts += [owner] if owner else []
        if len(rivals) > 1:
            clashes[kind, name] = text = _clash(rivals, owner)
            haul.refuse([each for each in rivals if each is not owner], DuplicatePartError(text))
    parts.sort(key=lambda each: (KINDS.index(each.kind), each.name))
    return Inventory(tuple(parts), tuple(haul.failures), tuple(disabled), clashes)


def _by_name(offers: Iterable[Offer]) -> dict[tuple[Kind, str], list[Offer]]:
    groups: dict[tuple[Kind, str], list[Offer]] = defaultdict(list)
    for offer in offers:
        group = groups[offer.kind, offer.name]
        if not any(offer.part is each.part and _same_owner(offer, each) for each in group):
            group.append(offer)
    return groups


def _owner(rivals: Sequence[Offer]) -> Offer | None:
    if len(rivals) == 1:
        return rivals[0]
    return next((each for each in rivals if each.source.built_in), None)


def _clash(rivals: Sequence[Offer], owner: Offer | None) -> str:
    kind, name = rivals[0].kind, rivals[0].name
    remedy = "the built-in keeps its name, rename the other" if owner else "uninstall or rename all but one"
    return f"{kind} {name!r} is offered {len(rivals)} times: by {' and by '.join(map(str, rivals))}; {remedy}"


def _same_owner(one: Offer, other: Offer) -> bool:
    return same_name(one.source.distribution) == same_name(other.source.distribution)


def _could_be(failure: Failure, kind: Kind, name: str) -> bool:
    if failure.kind not in {None, kind}:
        return False
    names = [each for each in (failure.source.entry_point, failure.name) if each]
    return same_name(name) in map(same_name, names)
