"""Every branch on the version of transformers."""

from importlib.metadata import version

from packaging.version import Version

INSTALLED = Version(version("transformers"))
OLDEST = Version("5.17")

CACHE_ARGUMENT = "cache" if Version("5.24") <= INSTALLED else "past_key_values"
"""The keyword under which a forward and ``generate`` take a cache."""
