"""Who takes part in the zoo, in which cells, and what matters most when time is short."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import attrs

from qevict import registry
from qevict.bench.needle import STORED
from qevict.bench.zoo.prompts import SEEN, UNSEEN
from qevict.bench.zoo.texts import LONG, SHORT
from qevict.errors import PolicyError, UnknownPartError
from qevict.policy import Policy
from qevict.registry.presets import policy_of

FULL, OURS = "full", "QEvict"
"""The cache that all lose against, and the policy that all are compared with."""

CANDIDATE, PLAIN, QUANTISED, EVICTING = "candidate", "plain", "quantised", "evicting"
"""What a policy is here: one that the target speaks of, one of ours to compare with, or one of two kinds of papers."""

_NONE: Mapping[str, Any] = MappingProxyType({})


@attrs.frozen
class Entrant:
    """A policy at any budget.

    Attributes:
        name: as figures show it.
        group: one of :data:`CANDIDATE`, :data:`PLAIN`, :data:`QUANTISED`, :data:`EVICTING`.
        compose: makes it at a budget; None where there is no budget.
        budgeted: whether it takes a budget.
    """

    name: str
    group: str
    compose: Callable[[str | None], Policy]
    budgeted: bool


@attrs.frozen
class _Known:
    """A preset by name, with options."""

    name: str
    group: str
    preset: str
    options: Mapping[str, Any] = _NONE


_KNOWN: Final = (
    _Known(FULL, CANDIDATE, "full"),
    _Known(OURS, CANDIDATE, "qevict"),
    _Known("diverse QEvict", CANDIDATE, "diverse_qevict"),
    _Known("evict-only", PLAIN, "evict_only"),
    _Known("sinks + recent", PLAIN, "sinks_recent"),
    _Known("INT8", QUANTISED, "int8"),
    _Known("INT4", QUANTISED, "int4"),
    _Known("INT3", QUANTISED, "int3"),
    _Known("INT2", QUANTISED, "int2"),
    _Known("KIVI, 4 bits", QUANTISED, "kivi", {"bits": 4}),
    _Known("KIVI, 2 bits", QUANTISED, "kivi", {"bits": 2}),
    _Known("OScaR, 2 bits", QUANTISED, "oscar"),
    _Known("ZipCache", QUANTISED, "zipcache"),
    _Known("nuq, 4 bits", QUANTISED, "nuq", {"bits": 4}),
    _Known("nuq, 3 bits", QUANTISED, "nuq"),
    _Known("nuq, 2 bits", QUANTISED, "nuq", {"bits": 2}),
    _Known("KeyDiff", EVICTING, "keydiff"),
    _Known("KeyDiff before RoPE", EVICTING, "keydiff", {"domain": "pre_rope"}),
    _Known("SnapKV", EVICTING, "snapkv"),
    _Known("AdaKV", EVICTING, "adakv"),
    _Known("CriticalKV", EVICTING, "criticalkv"),
    _Known("DefensiveKV", EVICTING, "defensivekv"),
    _Known("Layer-DefensiveKV", EVICTING, "layer_defensivekv"),
    _Known("H2O", EVICTING, "h2o"),
    _Known("TOVA", EVICTING, "tova"),
    _Known("PyramidKV", EVICTING, "pyramidkv"),
    _Known("Expected Attention", EVICTING, "expected_attention"),
)
"""KVzip is not among them: it lets the model repeat the prompt, which no recording can. Nor is KVQuant, which needs a
file of its calibration: it takes part as a guest, by a file that names it."""


@attrs.frozen
class Cell:
    """Where policies meet.

    Attributes:
        length: of the prompt, by name.
        mode: whether the question is compressed as well.
        budget: in text; None for policies without one.
    """

    length: str
    mode: str
    budget: str | None


@attrs.frozen
class Level:
    """Some groups in some cells, measured together, on the first prompts of each task.

    Attributes:
        groups: of entrants.
        length: of the prompts.
        mode: unseen or seen.
        budgets: of the budgeted ones; the others come in wherever their group does.
        prompts: of each task.
    """

    groups: tuple[str, ...]
    length: str
    mode: str
    budgets: tuple[str, ...]
    prompts: int


LEVELS: Final = (
    Level((CANDIDATE,), SHORT, UNSEEN, ("20 %", "10 %"), 48),
    Level((CANDIDATE,), LONG, UNSEEN, ("10 %", "5 %"), 4),
    Level((CANDIDATE,), SHORT, UNSEEN, ("5 %", "25 %"), 16),
    Level((CANDIDATE,), SHORT, SEEN, ("20 %", "10 %"), 16),
    Level((QUANTISED,), SHORT, UNSEEN, (), 12),
    Level((PLAIN, EVICTING), SHORT, UNSEEN, ("20 %", "10 %"), 12),
    Level((QUANTISED,), SHORT, SEEN, (), 12),
    Level((PLAIN, EVICTING), SHORT, SEEN, ("20 %", "10 %"), 12),
    Level((QUANTISED,), LONG, UNSEEN, (), 4),
    Level((PLAIN, EVICTING), SHORT, UNSEEN, ("5 %", "25 %"), 12),
    Level((CANDIDATE,), LONG, SEEN, ("10 %", "5 %"), 4),
    Level((PLAIN, EVICTING), LONG, UNSEEN, ("10 %", "5 %"), 4),
    Level((CANDIDATE,), SHORT, SEEN, ("5 %", "25 %"), 12),
)
"""What matters most comes first: each level is measured as far as it goes before the next one gets any time."""


def known_entrants() -> tuple[tuple[Entrant, ...], tuple[str, ...]]:
    """Those whose presets are installed, and the names of those whose are not."""
    found, missing = [], []
    for known in _KNOWN:
        try:
            preset = registry.default_registry().get("preset", known.preset)
        except UnknownPartError:
            missing.append(known.name)
            continue
        found.append(_entrant(known, preset))
    return tuple(found), tuple(missing)


def _entrant(known: _Known, preset: Callable[..., Policy]) -> Entrant:
    budgeted = "budget" in inspect.signature(preset).parameters

    def compose(budget: str | None) -> Policy:
        own = {"budget": budget} if budgeted else {}
        return attrs.evolve(policy_of(preset, **known.options, **own), dtype=STORED)

    return Entrant(known.name, known.group, compose, budgeted)


def guest(name: str, policy: Policy) -> Entrant:
    """A policy from outside, measured wherever the target is; its budget gives way to those of the cells.

    Raises:
        PolicyError: it stores full precision in another dtype than the field: equal budgets would not be equal bytes.
    """
    if policy.dtype not in {None, STORED}:
        msg = f"figures compare bytes of {STORED} storage, {name} stores {policy.dtype}; set it to bfloat16"
        raise PolicyError(msg)
    own, budgeted = attrs.evolve(policy, dtype=STORED), policy.budget is not None
    return Entrant(name, CANDIDATE, lambda budget: attrs.evolve(own, budget=budget) if budgeted else own, budgeted)


@attrs.frozen
class Run:
    """One policy in one cell.

    Attributes:
        name: of the entrant.
        cell: where.
        policy: what is measured.
    """

    name: str
    cell: Cell
    policy: Policy

    @property
    def key(self) -> str:
        """What it is known by among the runs of one prompt."""
        return run_key(self.cell.mode, self.name, self.cell.budget)


def run_key(mode: str, name: str, budget: str | None) -> str:
    """Mode, name and budget in one."""
    return "/".join((mode, name, budget or ""))


def run_of(key: str) -> tuple[str, str, str]:
    """Mode, name and budget again; a name may be the path of a file."""
    mode, rest = key.split("/", 1)
    name, budget = rest.rsplit("/", 1)
    return mode, name, budget


def runs(entrants: Sequence[Entrant], level: Level) -> Iterator[Run]:
    """What a level measures on each of its prompts."""
    for entrant in entrants:
        if entrant.group in level.groups:
            budgets: Sequence[str | None] = level.budgets if entrant.budgeted else (None,)
            for budget in budgets:
                yield Run(entrant.name, Cell(level.length, level.mode, budget), entrant.compose(budget))
