"""`qevict generate`: text on standard output, the report beside it."""

import json
import re
from pathlib import Path

import pytest
from tests.chat import save_chat_model
from tests.cli.conftest import Invoke

from qevict.errors import InputError, ModelError


def test_text_and_report(invoke: Invoke, chat_model: str) -> None:
    done = invoke("generate", "qevict", "Hello there", "--model", chat_model, "--max-new-tokens", "12")
    assert done.exit_code == 0, done.exception
    assert done.stdout
    assert "; backend " in done.stderr
    assert "backend flash" not in done.stdout


def test_a_context_is_compressed_first_and_the_prompt_may_be_piped(
    invoke: Invoke, chat_model: str, tmp_path: Path
) -> None:
    context = tmp_path / "context.txt"
    context.write_text("The lamp is lit at dusk. " * 20, encoding="utf-8")
    argv = ("--model", chat_model, "--context", str(context), "--max-new-tokens", "8", "--json", "--budget", "25 %")
    done = invoke("generate", "qevict", *argv, stdin="When is the lamp lit?")
    answer = json.loads(done.stdout)
    assert answer["report"]["windows"]["int2"] > 0
    assert answer["report"]["evictions"] > 0
    assert answer["report"]["tokens"][0] > 500
    raw = json.loads(invoke("generate", "qevict", "When?", *argv, "--raw").stdout)
    assert raw["report"]["tokens"][0] == 20 * 25 + len("When?") + 8 - 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [((), "there is no prompt"), (("x", "--context", "nowhere.txt"), "cannot read --context nowhere")],
)
def test_what_cannot_be_read_is_refused_before_the_model_loads(
    invoke: Invoke, argv: tuple[str, ...], words: str
) -> None:
    done = invoke("generate", "qevict", *argv, "--model", "no such model")
    assert isinstance(done.exception, InputError)
    assert words in str(done.exception)


def test_sampling(invoke: Invoke, chat_model: str) -> None:
    argv = ("--model", chat_model, "--max-new-tokens", "40", "--temperature", "5", "--json")
    texts = {json.loads(invoke("generate", "full", "Hello", *argv).stdout)["text"] for _ in range(3)}
    assert len(texts) > 1


def test_an_empty_context_is_refused(invoke: Invoke, chat_model: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n", encoding="utf-8")
    done = invoke("generate", "qevict", "Hello", "--model", chat_model, "--context", str(empty))
    assert isinstance(done.exception, InputError)
    assert "the document is" in str(done.exception)


def test_a_prompt_that_is_no_text_is_refused(invoke: Invoke) -> None:
    done = invoke("generate", "qevict", "caf\udce9", "--model", "no such model")
    assert isinstance(done.exception, InputError)
    assert invoke("generate", "qevict", "x", "--temperature", "1e-9").exit_code == 2


def test_what_the_model_s_folder_breaks_is_told(invoke: Invoke, tmp_path: Path) -> None:
    broken = save_chat_model(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"no weights")
    templated = save_chat_model(tmp_path / "template", template="{{ raise_exception('only once') }}")
    for folder, words in ((broken, "cannot load the model"), (templated, "the chat template of .* fails: only once")):
        done = invoke("generate", "qevict", "Hello", "--model", folder)
        assert isinstance(done.exception, ModelError)
        assert re.search(words, str(done.exception))
