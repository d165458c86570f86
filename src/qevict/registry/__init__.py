"""Finds parts and presets by name: the built-in ones and those of installed plugins."""

from qevict.registry.hookspecs import hookimpl
from qevict.registry.inventory import Inventory
from qevict.registry.kinds import Kind, Part, Preset
from qevict.registry.loading import Failure, Offer, Source
from qevict.registry.registry import PluginWarning, Registry, default_registry
from qevict.registry.switches import Switches

__all__ = [
    "Failure",
    "Inventory",
    "Kind",
    "Offer",
    "Part",
    "PluginWarning",
    "Preset",
    "Registry",
    "Source",
    "Switches",
    "default_registry",
    "hookimpl",
]
