"""Every branch on the version of transformers."""

from importlib.metadata import version
from typing import Any

from packaging.version import Version

INSTALLED = Version(version("transformers"))
OLDEST = Version("5.17")

CACHE_ARGUMENT = "cache" if Version("5.24") <= INSTALLED else "past_key_values"
"""The keyword under which a forward and ``generate`` take a cache."""


def empty_layer(layer: Any) -> None:
    """Reset a layer of the library; before 5.20 that zeroes what a layer holds, which then goes on behind it."""
    layer.reset()
    if getattr(layer, "keys", None) is not None:
        layer.keys = layer.values = None
        layer.is_initialized = False
