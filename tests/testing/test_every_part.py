"""Every part of this repository keeps the laws of its contract, by default and in the configurations that matter."""

import importlib
import itertools
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import tests.baselines
import torch

from qevict.backends.flash import FlashAttention
from qevict.backends.reference import ReferenceAttention
from qevict.ledgers.migration_stable import MigrationStable
from qevict.ledgers.re_encoding import ReEncoding
from qevict.quantizers.affine import PerChannel, PerToken
from qevict.registry import Part, Registry, Switches
from qevict.registry.kinds import CONTRACTS, PartKind
from qevict.routers.covering import CoverFirst
from qevict.routers.greedy import GreedyTiers
from qevict.scorers.cumulative import CumulativeAttention
from qevict.scorers.recency import Recency
from qevict.stores.memory import DeviceMemory
from qevict.testing import (
    BackendContract,
    Contract,
    LedgerContract,
    QuantizerContract,
    RouterContract,
    ScorerContract,
    StoreContract,
)
from qevict_template import KeyNorm

KITS: Mapping[PartKind, type[Contract[Any, Any]]] = {
    "scorer": ScorerContract,
    "quantizer": QuantizerContract,
    "router": RouterContract,
    "ledger": LedgerContract,
    "backend": BackendContract,
    "store": StoreContract,
}

REGISTRY = Registry([EntryPoint("baselines", "qevict_baselines.plugin", "qevict")], Switches())

PARTS: tuple[Part, ...] = (
    CumulativeAttention(),
    CumulativeAttention(prompt_queries=16),
    CumulativeAttention(prompt_stride=4, observe_tokens=2),
    Recency(),
    KeyNorm(),
    *(kind(bits) for kind in (PerChannel, PerToken) for bits in (2, 3, 4, 8)),
    *(kind(2, dtype) for kind in (PerChannel, PerToken) for dtype in (torch.bfloat16, torch.float32)),
    CoverFirst(),
    GreedyTiers(),
    GreedyTiers(shares=(0.3, 0.7)),
    GreedyTiers(shares=(1.0, 0.0)),
    GreedyTiers(shares=(0.2, 0.3, 0.5)),
    MigrationStable(),
    ReEncoding(),
    DeviceMemory(),
    ReferenceAttention(),
    FlashAttention(),
)


def kind_of(part: Part) -> PartKind:
    return next(kind for kind, contract in CONTRACTS.items() if isinstance(part, contract))


EXAMPLES = 10
"""Of each law; fewer than the kit gives to strangers, since there are many parts and their own tests beside."""

for number, part in enumerate(PARTS):
    name, kit = f"Test{type(part).__name__}{number}", KITS[kind_of(part)]
    own = {"part": part, "examples": min(kit.examples, EXAMPLES), "__module__": __name__}
    globals()[name] = type(name, (kit,), own)


@pytest.mark.parametrize("kind", CONTRACTS)
def test_every_part_of_this_repository_is_judged(kind: PartKind) -> None:
    offered = {each.part for each in REGISTRY.inventory().parts if each.kind == kind}
    missing = offered - {type(part) for part in PARTS} - judged_beside_their_values()
    assert not missing, f"add an instance of each to PARTS: {missing}"


def judged_beside_their_values() -> set[type]:
    """Baselines, each of which has its kit in the module that tests its values."""
    files = sorted(Path(tests.baselines.__file__).parent.glob("test_*.py"))
    members = [vars(importlib.import_module(f"tests.baselines.{file.stem}")).values() for file in files]
    suites = [each for each in itertools.chain(*members) if isinstance(each, type) and issubclass(each, Contract)]
    return {type(suite.part) for suite in suites if hasattr(suite, "part")}
