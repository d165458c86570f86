"""Options that name a file to write."""

import os
from pathlib import Path

import typer


def writable(path: Path | None) -> Path | None:
    """Find out before the measurement, not after it."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise typer.BadParameter(f"{path} cannot be written: it is a folder, or its folder is not there or not yours")
    return path
