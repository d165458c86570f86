"""Builds the operator where a compiler is; where none is, or where it fails, the package comes without."""

import os
import platform
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

STABLE_ABI = "0x020a000000000000"
"""torch 2.10: the oldest whose stable ABI has what the operator uses; newer ones keep it."""

FLAGS = ["-std=gnu++17", "-O3", "-g0", "-ffp-contract=fast", "-fvisibility=hidden", "-Wno-psabi"]
"""Plain -O2 does not unroll what must be in registers. Never -march=native: the operator chooses when it runs."""

SANITIZERS = (
    ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"] if "QEVICT_SANITIZE" in os.environ else []
)
"""For the tests alone: every access and every operation is watched, and optimising would take minutes."""

LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")
"""Free-threaded Pythons have no limited API; the operator uses none of Python's, so that only its name differs."""

HINT = "qevict-fused comes without its operator, and attends as the flash backend does"


class BuildIfPossible(build_ext):  # type: ignore[misc]  # setuptools ships no types
    """Says why nothing was built instead of failing."""

    def run(self) -> None:
        """Build anew: what an earlier version left behind would be called with other arguments."""
        if self.inplace or self.editable_mode:  # a build for elsewhere, as that under sanitizers, leaves it alone
            for old in Path("src").rglob("_operator*.so"):
                old.unlink()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Compile against the headers of torch."""
        if platform.system() == "Windows":
            self.warn(f"{HINT}: it is built with GCC or Clang, on Linux and macOS")
            return
        try:
            torch = _torch()
            ext.include_dirs.append(str(torch / "include"))
            ext.library_dirs.append(str(torch / "lib"))
            super().build_extension(ext)
        except Exception as error:  # noqa: BLE001 - whatever a compiler does, the package is of use without
            self.warn(f"{HINT}: {error}")


def _torch() -> Path:
    import torch  # noqa: PLC0415 - where the metadata is asked for, it need not be there

    return Path(torch.__file__).parent


setup(
    ext_modules=[
        Extension(
            "qevict_fused._operator",
            sources=["csrc/operator.cpp", "csrc/portable.cpp", "csrc/avx2.cpp"],
            depends=["csrc/problem.h", "csrc/vectors.h", "csrc/kernel.inc"],
            define_macros=[("TORCH_TARGET_VERSION", STABLE_ABI)],
            extra_compile_args=[*FLAGS, *SANITIZERS, *(["-O1"] if SANITIZERS else [])],
            extra_link_args=SANITIZERS,
            libraries=["torch_cpu"],  # loaded by torch already, wherever it is installed
            py_limited_api=LIMITED,
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildIfPossible},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {},
)
