"""Names to classes and presets."""

import functools
import importlib.metadata
import threading
import warnings
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Final, Literal, overload

from qevict.contracts.backend import AttentionBackend
from qevict.contracts.ledger import Ledger
from qevict.contracts.quantizer import Quantizer
from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import Scorer
from qevict.contracts.store import Store
from qevict.errors import PluginError, UnknownPartError
from qevict.registry import builtins
from qevict.registry.inventory import Inventory, settle
from qevict.registry.kinds import KINDS, Part, PartKind, Preset
from qevict.registry.loading import Haul, Offer, Source, load, source_of
from qevict.registry.switches import Switches
from qevict.version import own_version

GROUP: Final = "qevict"
"""The entry-point group of plugins."""

BACKENDS: Final = "qevict.backends"
"""The entry-point group of those among them whose backends are asked wherever a policy names none."""


class PluginWarning(UserWarning):
    """An installed plugin, or a part of it, could not be loaded; everything else works."""


class Registry:
    """Finds parts and presets by name: the built-in ones, then those of installed plugins.

    Plugins are imported when a name is not built in, or when everything is listed, and never before; those that offer
    backends unasked also when a policy leaves the choice open.

    Args:
        entry_points: the plugins; None for all that are installed.
        switches: how to load; None for what the environment says.
    """

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None, switches: Switches | None = None) -> None:
        self._entry_points = None if entry_points is None else tuple(entry_points)
        self._switches = Switches.from_environment() if switches is None else switches
        self._lock = threading.RLock()
        self._loading = False
        self._builtins: Inventory | None = None
        self._everything: Inventory | None = None
        self._unasked: tuple[AttentionBackend, ...] | None = None

    @overload
    def get(self, kind: Literal["scorer"], name: str) -> type[Scorer]: ...
    @overload
    def get(self, kind: Literal["quantizer"], name: str) -> type[Quantizer]: ...
    @overload
    def get(self, kind: Literal["router"], name: str) -> type[TierRouter]: ...
    @overload
    def get(self, kind: Literal["ledger"], name: str) -> type[Ledger]: ...
    @overload
    def get(self, kind: Literal["backend"], name: str) -> type[AttentionBackend]: ...
    @overload
    def get(self, kind: Literal["store"], name: str) -> type[Store]: ...
    @overload
    def get(self, kind: PartKind, name: str) -> type[Part]: ...
    @overload
    def get(self, kind: Literal["preset"], name: str) -> Preset: ...
    @overload
    def get(self, kind: str, name: str) -> type[Part] | Preset: ...
    def get(self, kind: str, name: str) -> type[Part] | Preset:
        """The class, or the preset, of that kind and name.

        Raises:
            UnknownPartError: there is none; the message says what there is.
            DuplicatePartError: several distributions offer it.
            PluginError: a plugin that has, or offers, that name could not be loaded.
        """
        if kind not in KINDS:
            raise UnknownPartError(f"no kind of part is named {kind!r}; the kinds are {', '.join(KINDS)}")
        found = self._load_builtins().find(kind, name) or self._load_all().find(kind, name)
        if found is None:
            self._load_all().explain_miss(kind, name)
        return found

    def inventory(self) -> Inventory:
        """Everything that is there, and what could not be loaded; imports all plugins."""
        return self._load_all()

    def offered_backends(self) -> tuple[AttentionBackend, ...]:
        """One of each backend that plugins offer unasked, by name; imports those plugins.

        What cannot be made without arguments, or fails, is left out with a warning.
        """
        with self._lock:
            if self._unasked is None:
                found = self._load_plugins(self._load_builtins(), BACKENDS)
                _warn_of(found)
                own = (each for each in found.parts if each.kind == "backend" and not each.source.built_in)
                self._unasked = tuple(backend for each in own for backend in _made(each))
        return self._unasked

    def _load_builtins(self) -> Inventory:
        with self._lock:
            if self._builtins is None:
                haul = Haul(self._switches)
                load(lambda: builtins, Source("qevict", own_version()), haul)
                self._builtins = settle(haul)
            return self._builtins

    def _load_all(self) -> Inventory:
        with self._lock:
            if self._everything is None:
                self._everything = self._load_plugins(self._load_builtins(), GROUP)
                _warn_of(self._everything)
            return self._everything

    def _load_plugins(self, ours: Inventory, group: str) -> Inventory:
        if self._loading:
            raise PluginError("a plugin asked the registry for something while it was being loaded; ask later")
        self._loading = True
        try:
            haul, disabled = Haul(self._switches, [*ours.parts], [*ours.failures]), []
            for entry_point in self._find_plugins(haul, group):
                source = source_of(entry_point)
                if self._switches.allow(source.distribution, source.entry_point):
                    load(entry_point.load, source, haul)
                else:
                    disabled.append(source)
            return settle(haul, disabled)
        finally:
            self._loading = False

    def _find_plugins(self, haul: Haul, group: str) -> Iterable[EntryPoint]:
        found = self._entry_points
        if found is None:
            with haul.guard(Source("installed distributions", "", "*")):
                found = tuple(importlib.metadata.entry_points(group=group))
        own = (each for each in found or () if each.group == group)
        return sorted(own, key=lambda each: (source_of(each).distribution, each.name))


def _warn_of(inventory: Inventory) -> None:
    for failure in inventory.failures:
        warnings.warn(str(failure), PluginWarning, stacklevel=4)


def _made(offer: Offer) -> list[AttentionBackend]:
    try:
        made = offer.part() if isinstance(offer.part, type) else None
    except Exception as error:  # noqa: BLE001 - whatever a plugin does, the others are asked
        warnings.warn(f"{offer} cannot be asked: {error}", PluginWarning, stacklevel=4)
        return []
    return [made] if isinstance(made, AttentionBackend) else []


@functools.cache
def default_registry() -> Registry:
    """The registry of this process: what is built in, and all installed plugins."""
    return Registry()
