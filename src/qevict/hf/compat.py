"""Every branch on the version of transformers."""

from importlib.metadata import version

from packaging.version import Version

INSTALLED = Version(version("transformers"))
OLDEST = Version("5.17")

CACHE_ARGUMENT = "cache" if Version("5.24") <= INSTALLED else "past_key_values"
"""The keyword under which a forward and ``generate`` take a cache."""

LATER_CHUNKS = Version("5.21") <= INSTALLED
"""``prefill_chunk_size`` counts what a cache has seen; before, it cut the mask of a later turn from its beginning."""
