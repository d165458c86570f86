"""Which qevict this is."""

import importlib.metadata


def own_version() -> str:
    """The installed version; a source tree that nobody installed says so."""
    try:
        return importlib.metadata.version("qevict")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
