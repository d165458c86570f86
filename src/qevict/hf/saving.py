"""A cache in a file: safetensors, with everything that is no tensor as JSON in its header; nothing is pickled."""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qevict.config import dumps, loads
from qevict.engine.engine import Engine
from qevict.engine.snapshot import LayerNumbers, Numbers, Snapshot, restore, take
from qevict.engine.soundness import disagreement, forms, misplaced
from qevict.engine.wiring import Wiring
from qevict.errors import CacheFileError, PolicyFileError
from qevict.hf.identity import identity
from qevict.hf.library_state import fill, parted
from qevict.policy import Policy

FORMAT, VERSION = "qevict-cache", "1"

_DAMAGED = "is damaged; save the cache again"
_ENTRIES: dict[str, type] = {"policy": str, "model": dict, "numbers": dict, "library": list}


def save(path: str | os.PathLike[str], engine: Engine, library_layers: Sequence[Any], model: Any) -> None:
    """Write a cache; see :meth:`qevict.Cache.save`."""
    snapshot, library = take(engine), [parted(layer) for layer in library_layers]
    tensors = dict(snapshot.tensors)
    for index, (_, own) in enumerate(library):
        tensors |= {f"library.{index}.{name}": tensor for name, tensor in own.items()}
    content = {
        "policy": dumps(engine.wiring.policy),
        "model": identity(model),
        "numbers": attrs.asdict(snapshot.numbers),
        "library": [plain for plain, _ in library],
    }
    text = json.dumps(content)
    metadata = {"format": FORMAT, "version": VERSION, "content": text, "digest": _digest(text, tensors)}
    with _replacing(Path(path)) as temporary:
        save_file(tensors, temporary, metadata)


def _digest(content: str, tensors: Mapping[str, Tensor]) -> str:
    """Of every byte of a file that says something."""
    digest = hashlib.sha256(content.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` that takes its place once it is written; gone if it is not."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@attrs.frozen(eq=False)
class SavedCache:
    """A file that is open.

    Attributes:
        path: its name, for messages.
        metadata: the texts in its header.
        content: the JSON among them.
        file: what gives the tensors.
    """

    path: str
    metadata: Mapping[str, str]
    content: Mapping[str, Any]
    file: Any

    @property
    def policy(self) -> Policy:
        """What rules the cache.

        Raises:
            PolicyFileError: a part is not installed.
        """
        try:
            return loads(self.content["policy"])
        except PolicyFileError as error:
            raise PolicyFileError(error.problems, self.path) from None

    def check_model(self, model: Any) -> None:
        """The cache of one model tells another one nothing.

        Raises:
            CacheFileError: it is not the model that filled the cache.
        """
        saved, own = self.content["model"], json.loads(json.dumps(identity(model)))
        for name in dict.fromkeys([*own, *saved]):
            if saved.get(name) != own.get(name):
                found, wanted = saved.get(name), own.get(name)
                self.refuse(
                    f"belongs to a model of {name} {found!r}, this one has {wanted!r}; load it with its own model"
                )

    def fill(self, engine: Engine, library_layers: Sequence[Any]) -> None:
        """Put what is in the file into an empty cache that was made for its policy and model.

        Raises:
            CacheFileError: what is in the file is not what it has to be.
        """
        wiring = engine.wiring
        try:
            numbers = _numbers(self.content["numbers"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CacheFileError(f"{self.path} {_DAMAGED} (numbers: {error!r})") from None
        if wrong := disagreement(wiring, numbers):
            self.refuse(f"{_DAMAGED} ({wrong})")
        tensors = self._tensors(wiring.device)
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith("library.")}
        self._check_names(own, set(forms(wiring, numbers)))
        for name, spec in forms(wiring, numbers).items():
            found = tuple(own[name].shape), own[name].dtype
            if found != (spec.shape, spec.dtype):
                self.refuse(f"holds {name!r} as {found}, wanted {(spec.shape, spec.dtype)}; save the cache again")
        snapshot = Snapshot(own, numbers)
        if (index := misplaced(wiring, snapshot)) is not None:
            self.refuse(f"{_DAMAGED} (windows of layer {index} lie where they cannot)")
        self._fill_library(library_layers, tensors, wiring, numbers)
        if self.metadata.get("digest") != _digest(self.metadata["content"], tensors):
            self.refuse(f"{_DAMAGED} (its bytes are not those that were written)")
        restore(engine, snapshot)

    def refuse(self, what: str) -> None:
        """Say what is wrong with the file."""
        raise CacheFileError(f"{self.path} {what}")

    def _tensors(self, device: torch.device) -> dict[str, Tensor]:
        try:
            return {name: self.file.get_tensor(name).to(device) for name in self.file.keys()}  # noqa: SIM118 - no dict
        except (SafetensorError, ValueError) as error:
            raise CacheFileError(f"{self.path} {_DAMAGED} ({error})") from None

    def _check_names(self, found: Mapping[str, Any], wanted: set[str]) -> None:
        missing, surplus = wanted - found.keys(), found.keys() - wanted
        if missing or surplus:
            self.refuse(
                f"lacks tensors {sorted(missing)[:3]} and has {sorted(surplus)[:3]} too many; save the cache again"
            )

    def _fill_library(
        self, layers: Sequence[Any], tensors: Mapping[str, Tensor], wiring: Wiring, numbers: Numbers
    ) -> None:
        saved, wanted = self.content["library"], [type(layer).__name__ for layer in layers]
        if [own["type"] for own in saved] != wanted:
            self.refuse(f"holds layers of the library {[own['type'] for own in saved]}, wanted {wanted}")
        lengths = [own["values"].get("cumulative_length", 0) for own in saved]
        seen = numbers.seen if wiring.geometry.layers else max(lengths, default=0)
        left = {name for name in tensors if name.startswith("library.")}
        for index, (layer, own) in enumerate(zip(layers, saved, strict=True)):
            prefix = f"library.{index}."
            held = {n.removeprefix(prefix): tensor for n, tensor in tensors.items() if n.startswith(prefix)}
            left -= {prefix + name for name in held}
            if wrong := fill(layer, own["values"], held, wiring.geometry, len(numbers.tokens), seen):
                self.refuse(f"{_DAMAGED} (layer {index} of the library: {wrong})")
        self._check_names(dict.fromkeys(left), set())


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[SavedCache]:
    """Open a saved cache.

    Raises:
        CacheFileError: there is no such file, or it holds no cache, or one of another version.
    """
    name = os.fspath(path)
    try:
        file: Any = safe_open(name, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CacheFileError(f"{name} cannot be read as a saved cache: {error}") from None
    with file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            msg = f"{name} holds no cache: its format is {metadata.get('format')!r}, wanted {FORMAT!r}"
            raise CacheFileError(f"{msg}; give a file that cache.save wrote")
        if metadata.get("version") != VERSION:
            msg = f"{name} has version {metadata.get('version')!r} of the format, this qevict reads {VERSION!r}"
            raise CacheFileError(f"{msg}; fill the cache again and save it")
        yield SavedCache(name, metadata, _content(name, metadata), file)


def _content(name: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        content = json.loads(metadata["content"])
        missing = _ENTRIES.keys() - content.keys()
    except (KeyError, ValueError, AttributeError) as error:
        raise CacheFileError(f"{name} {_DAMAGED} ({error!r})") from None
    if missing:
        raise CacheFileError(f"{name} {_DAMAGED} (its header lacks {sorted(missing)})")
    for entry, kind in _ENTRIES.items():
        if not isinstance(content[entry], kind):
            raise CacheFileError(f"{name} {_DAMAGED} (the {entry} in its header is no {kind.__name__})")
    if not all(isinstance(own, dict) and {"type", "values"} == own.keys() and isinstance(own["values"], dict)
               for own in content["library"]):  # fmt: skip
        raise CacheFileError(f"{name} {_DAMAGED} (the library in its header)")
    return dict(content)


def _numbers(raw: Mapping[str, Any]) -> Numbers:
    """Numbers as :class:`Numbers`, which JSON knows as lists."""
    layers = [
        LayerNumbers(
            counts=_by_segment(own["counts"]),
            opened=_counts(own["opened"]),
            regions=_by_segment(own["regions"]),
            live=_by_segment(own["live"]),
            whole=_flag(own["whole"]),
            totals=_counts(own["totals"]),  # type: ignore[arg-type]  # how many there are is checked with the rest
        )
        for own in raw["layers"]
    ]
    prompt = raw["prompt_tokens"]
    return Numbers(
        seen=_count(raw["seen"]),
        tokens=_counts(raw["tokens"]),
        since=_counts(raw["since"]),
        unbroken=_counts(raw["unbroken"]),
        events=_by_segment(raw["events"]),
        prompt_tokens=None if prompt is None else _count(prompt),
        prompted=_flag(raw["prompted"]),
        layers=tuple(layers),
    )


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")  # noqa: TRY004 - of a file, not of a caller
    return value


def _counts(values: Sequence[object]) -> tuple[int, ...]:
    return tuple(map(_count, values))


def _by_segment(values: Sequence[Sequence[object]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(_counts, values))
