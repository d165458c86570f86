"""On what a figure was measured."""

import platform
from typing import Any

import torch
import transformers

from qevict.version import own_version


def provenance(model: Any) -> dict[str, Any]:
    """Model, machine and versions, for the record beside a figure."""
    computed = str(model.dtype).removeprefix("torch.")
    return {
        "model": f"{model.name_or_path.rstrip('/').rsplit('/', 1)[-1]}, computed in {computed}",
        "machine": f"CPU, {platform.machine()} {torch.backends.cpu.get_cpu_capability()}, "
        f"{torch.get_num_threads()} threads, {platform.system()}",
        "versions": {"qevict": own_version(), "torch": torch.__version__, "transformers": transformers.__version__},
    }
