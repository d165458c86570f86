"""When the fused backend is chosen, and what it does without its operator."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import qevict
from qevict.backends.flash import FlashAttention
from qevict.contracts.backend import Setting
from qevict.engine.choice import BUILT_IN, choose
from qevict.errors import PolicyError
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.registry import default_registry
from qevict_fused import FusedAttention, backend, native
from tests.fused import compiler, needs_operator
from tests.fused.layouts import PLAIN, SCOPES, TRANSFORMED
from tests.fused.views import Sizes, make

CPU = torch.device("cpu")

nm = shutil.which("nm") if sys.platform == "linux" else None


def setting(**changes: Any) -> Setting:
    given: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "window_tokens": 8, "codecs": PLAIN, "head_dim": 64}
    return Setting(**given | changes)


@pytest.mark.skipif(compiler is None, reason="no compiler is here")
def test_where_a_compiler_is_the_operator_was_built() -> None:
    assert native.missing() is None


@needs_operator
@pytest.mark.skipif(nm is None, reason="no nm of binutils is here")
def test_it_asks_for_the_stable_abi_alone() -> None:
    """No C++ symbol of torch, and none of Python: the wheel serves every version of both."""
    built = next(Path(native.__file__).parent.glob("_operator*.so"))
    assert nm is not None
    listed = subprocess.run([nm, "-D", "--undefined-only", str(built)], capture_output=True, text=True, check=True)
    symbols = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert any(symbol.startswith("aoti_torch_") for symbol in symbols)
    assert not [symbol for symbol in symbols if re.search(r"^_?Py|N?K?(2at|3c10|5torch)", symbol)]


@needs_operator
def test_it_is_chosen_where_the_policy_leaves_it_open() -> None:
    offered = default_registry().offered_backends()
    assert FusedAttention() in offered
    choice = choose(qevict.policies.qevict("20 %"), setting(), (*offered, *BUILT_IN))
    assert choice.backend == FusedAttention()
    assert choice.reason == f"on cpu through qevict_fused::attend ({native.instruction_set()}), codes read in place"


@needs_operator
@pytest.mark.parametrize("codecs", [(), PLAIN, SCOPES, TRANSFORMED], ids=["none", "plain", "scopes", "transformed"])
def test_it_suits_every_layout_of_the_core(codecs: Any) -> None:
    assert FusedAttention().reason(setting(codecs=codecs))


@needs_operator
@pytest.mark.parametrize(
    "changes",
    [
        {"device": torch.device("meta")},
        {"dtype": torch.float64},
        {"head_dim": 72},
        {"codecs": ((PerToken(2), PerToken(2)),)},
        {"codecs": ((PerChannel(2), PerChannel(2)),)},
    ],
    ids=str,
)
def test_it_leaves_to_others_what_it_cannot_read(changes: dict[str, Any]) -> None:
    assert FusedAttention().reason(setting(**changes)) is None


@needs_operator
def test_what_it_cannot_read_is_attended_to_all_the_same() -> None:
    query, view = make(Sizes(group=2), ((PerToken(2), PerToken(2)),))
    got = FusedAttention().attend(query, view, want_mass=True)
    torch.testing.assert_close(got.output, FlashAttention().attend(query, view, want_mass=True).output, rtol=0, atol=0)


def test_unknown_instructions_are_refused() -> None:
    with pytest.raises(PolicyError, match="avx512"):
        FusedAttention(instructions="avx512")  # type: ignore[arg-type]


def test_without_its_operator_it_says_so_and_attends_as_the_flash_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "missing", lambda: "no compiler was there")
    assert FusedAttention().reason(setting()) is None
    query, view = make(Sizes(group=2), PLAIN)
    with pytest.warns(UserWarning, match="as the flash backend does: no compiler was there"):
        got = FusedAttention().attend(query, view, want_mass=True)
    wanted = FlashAttention().attend(query, view, want_mass=True)
    assert torch.equal(got.output, wanted.output)
