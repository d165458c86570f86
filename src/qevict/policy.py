"""A policy: a frozen composition of parts that validates itself."""

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

from qevict.contracts.backend import AttentionBackend
from qevict.contracts.budget import Accounting, Budget, to_budget
from qevict.contracts.ledger import Ledger
from qevict.contracts.quantizer import Quantizer
from qevict.contracts.router import TierRouter
from qevict.contracts.scorer import Scorer
from qevict.contracts.store import Store
from qevict.contracts.values import Granularity, Positions, RouteAt
from qevict.errors import PolicyError
from qevict.needs import check_backend, check_looks, check_needs

_Validator = Callable[[Any, Any, Any], None]

_STORED_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)


_MOST = 2**31 - 1
_RESERVED = ("protected", "evicted")
"""What reports call windows that are in no tier."""


def _whole_number(least: int) -> _Validator:
    def check(_instance: object, attribute: "attrs.Attribute[int]", value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            msg = f"{attribute.name} must be a whole number of at least {least}, got {value!r}"
            raise PolicyError(msg)
        if value > _MOST:
            msg = f"{attribute.name} must be below 2^31, got {value}"
            raise PolicyError(msg)

    return check


def _yes_or_no(_instance: object, attribute: "attrs.Attribute[bool]", value: object) -> None:
    if not isinstance(value, bool):
        msg = f"{attribute.name} must be True or False, got {value!r}"
        raise PolicyError(msg)


def _one_of(*allowed: object) -> _Validator:
    def check(_instance: object, attribute: "attrs.Attribute[object]", value: object) -> None:
        if value not in allowed:
            msg = f"{attribute.name}={value!r} is not allowed; allowed: {', '.join(map(repr, allowed))}"
            raise PolicyError(msg)

    return check


def _part(contract: type, *, optional: bool = False) -> _Validator:
    def check(_instance: object, attribute: "attrs.Attribute[object]", value: object) -> None:
        if isinstance(value, contract) or (optional and value is None):
            return
        hint = (
            "; names are for files and the command line, Python code passes objects" if isinstance(value, str) else ""
        )
        if isinstance(value, type):
            hint = f"; pass an instance: {value.__name__}()"
        msg = f"{attribute.name} must be a {contract.__name__}, got {value!r}{hint}"
        raise PolicyError(msg)

    return check


def _both_or_neither(keys: Quantizer | None, values: Quantizer | None, name: str) -> None:
    if (keys is None) != (values is None):
        msg = f"tier {name!r} quantizes only one of keys and values; give both or neither"
        raise PolicyError(msg)


def _as_call(value: "Policy | Tier") -> str:
    """The call that makes the value, without what is as by default."""
    fields = (field for field in attrs.fields(type(value)) if getattr(value, field.name) != field.default)
    return f"{type(value).__name__}({', '.join(f'{field.name}={getattr(value, field.name)!r}' for field in fields)})"


@attrs.frozen(repr=False)
class Tier:
    """An ordered place for windows.

    Args:
        name: unique in its policy.
        keys: quantizer of the keys; None keeps full precision.
        values: quantizer of the values; None keeps full precision.
        store: where the tier's bytes live.

    Raises:
        PolicyError: a part is not of its kind, or only one of keys and values is quantized.
    """

    name: str
    keys: Quantizer | None = attrs.field(default=None, validator=_part(Quantizer, optional=True))
    values: Quantizer | None = attrs.field(default=None, validator=_part(Quantizer, optional=True))
    store: Store = attrs.field(kw_only=True, validator=_part(Store))

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            msg = f"a tier needs a name, got {self.name!r}"
            raise PolicyError(msg)
        if self.name in _RESERVED:
            msg = f"no tier can be named {self.name!r}, as reports call what is in no tier; choose another name"
            raise PolicyError(msg)
        _both_or_neither(self.keys, self.values, self.name)

    def __repr__(self) -> str:
        return _as_call(self)

    @property
    def codec(self) -> tuple[Quantizer, Quantizer] | None:
        """Quantizers of keys and values, or None for full precision."""
        return None if self.keys is None or self.values is None else (self.keys, self.values)


def _tiers(value: Iterable[Tier]) -> tuple[Tier, ...]:
    if isinstance(value, Tier) or not isinstance(value, Iterable):
        msg = f"tiers must be one Tier or more, hot to cold, got {value!r}; for one tier write (tier,)"
        raise PolicyError(msg)
    return tuple(value)


@attrs.frozen(kw_only=True, repr=False)
class Policy:
    """What is kept of a KV cache, where and how: a value that compares, hashes and prints.

    Args:
        scorer: which windows matter.
        router: in which tier each window lives.
        tiers: hot to cold; what fits in none is evicted.
        ledger: what stays known of a window while it moves.
        backend: how attention reads the mixture; None to have one chosen for the device, which reports name with the
            reason.
        budget: bytes per row: ``Fraction(0.2)``, ``Bytes(...)``, ``Tokens(...)``, their text (``"20 %"``), or None for
            no limit. A fraction is of what a full cache in the stored dtype would hold for the row now.
        window_tokens: tokens that are routed together.
        period_tokens: a routing event follows whenever that many tokens have come.
        sink_tokens: first tokens of a row, always in full precision.
        recent_tokens: last tokens of a row, always in full precision; 0 counts as 1: the token just written stays.
        granularity: whether KV heads of a row decide together (``"row"``) or apart (``"kv_head"``).
        dtype: dtype in which full precision is stored (sinks and recent tokens included); None for the model's.
        accounting: ``"exact"`` bills every byte; ``"paper"`` bills codes times 1.05 and nothing else.
        min_tokens: rows shorter than that are left whole; with ``route_at="prompt"`` those that are when it ends, for
            good.
        route_at: ``"period"`` routes at the prompt's end and whenever ``period_tokens`` have come; ``"prompt"``
            compresses once, at the prompt's end, as many papers do: what is decoded stays, and the cache grows by it
            beyond its budget, which reports name.
        positions: where attention sees the kept keys: ``"original"`` at their true positions, ``"cache_relative"`` at
            their places in the cache, as StreamingLLM does (for scorers that keep a suffix).
        keep_newest: the token just written always stays; False lets it compete as TOVA does, if ``recent_tokens`` is 0.
        strict: raise when what no router sees (sinks, recent tokens, room until the next event) alone exceeds the
            budget; otherwise the report names the overshoot.

    Raises:
        PolicyError: the composition cannot work; the message names the part and the remedy.
        BudgetError: the budget is not one.
    """

    scorer: Scorer = attrs.field(validator=_part(Scorer))
    router: TierRouter = attrs.field(validator=_part(TierRouter))
    tiers: tuple[Tier, ...] = attrs.field(converter=_tiers)
    ledger: Ledger = attrs.field(validator=_part(Ledger))
    backend: AttentionBackend | None = attrs.field(default=None, validator=_part(AttentionBackend, optional=True))
    budget: Budget | None = attrs.field(default=None, converter=to_budget)
    window_tokens: int = attrs.field(default=8, validator=_whole_number(1))
    period_tokens: int = attrs.field(default=8, validator=_whole_number(1))
    sink_tokens: int = attrs.field(default=5, validator=_whole_number(0))
    recent_tokens: int = attrs.field(default=32, validator=_whole_number(0))
    granularity: Granularity = attrs.field(default="row", validator=_one_of("row", "kv_head"))
    dtype: torch.dtype | None = attrs.field(default=None, validator=_one_of(*_STORED_DTYPES))
    accounting: Accounting = attrs.field(default="exact", validator=_one_of("exact", "paper"))
    min_tokens: int = attrs.field(default=0, validator=_whole_number(0))
    route_at: RouteAt = attrs.field(default="period", validator=_one_of("period", "prompt"))
    positions: Positions = attrs.field(default="original", validator=_one_of("original", "cache_relative"))
    keep_newest: bool = attrs.field(default=True, validator=_yes_or_no)
    strict: bool = attrs.field(default=False, validator=_yes_or_no)

    def __attrs_post_init__(self) -> None:
        _check_tiers(self.tiers)
        check_looks(self.scorer, self.period_tokens)
        self.router.check(len(self.tiers))
        for tier in self.tiers:
            if tier.codec is not None:
                # One head_dim shows whether windows of that length can be encoded; the model's is checked at attach.
                for quantizer in tier.codec:
                    quantizer.layout(self.window_tokens, 64)
                    quantizer.shared_layout(64)
        check_needs(self.scorer)
        _check_newest(self)
        _check_positions(self)
        check_backend(self.scorer, self.backend)

    def __deepcopy__(self, _memo: object) -> "Policy":
        return self

    def __repr__(self) -> str:
        return _as_call(self)

    @property
    def protected_tokens(self) -> int:
        """Recent tokens that are never ranked; the token just written is one of them, unless it has to compete."""
        return max(self.recent_tokens, 1) if self.keep_newest else 0

    def with_tier(self, name: str, /, **changes: object) -> "Policy":
        """A policy in which one tier is changed: ``policy.with_tier("int2", keys=PerChannel(bits=4), ...)``.

        Raises:
            PolicyError: no tier has that name, or a tier has no such field.
        """
        fields = [field.name for field in attrs.fields(Tier)]
        if unknown := [field for field in changes if field not in fields]:
            msg = (
                f"a tier has no field {', '.join(map(repr, unknown))}; fields: {', '.join(fields)}; bits belong to a "
                "quantizer: keys=PerChannel(bits=4), values=PerToken(bits=4)"
            )
            raise PolicyError(msg)
        if name not in {tier.name for tier in self.tiers}:
            msg = f"no tier is named {name!r}; tiers: {', '.join(tier.name for tier in self.tiers)}"
            raise PolicyError(msg)
        tiers = (attrs.evolve(tier, **changes) if tier.name == name else tier for tier in self.tiers)  # type: ignore[arg-type]
        return attrs.evolve(self, tiers=tuple(tiers))


def _check_newest(policy: Policy) -> None:
    if not policy.keep_newest and policy.recent_tokens:
        msg = (
            f"keep_newest=False lets the newest token compete, but recent_tokens={policy.recent_tokens} protects it; "
            f"give recent_tokens=0, or leave keep_newest=True"
        )
        raise PolicyError(msg)


def _check_positions(policy: Policy) -> None:
    """Places in the cache follow from the true positions only where sinks and a suffix are kept, as they came."""
    if policy.positions == "original":
        return
    if not policy.scorer.keeps_suffix:
        msg = (
            f"positions='cache_relative' serves scorers that keep a suffix, such as Recency; scorer "
            f"{policy.scorer.name!r} does not; use positions='original'"
        )
        raise PolicyError(msg)
    if len(policy.tiers) > 1 or policy.tiers[0].codec is not None:
        msg = "positions='cache_relative' serves one tier in full precision; drop the other tiers, or use 'original'"
        raise PolicyError(msg)


def _check_tiers(tiers: tuple[Tier, ...]) -> None:
    if not tiers or not all(isinstance(tier, Tier) for tier in tiers):
        msg = f"tiers must be one Tier or more, hot to cold, got {tiers!r}"
        raise PolicyError(msg)
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names):
        msg = f"tier names must differ, got {names}"
        raise PolicyError(msg)
    if any(tier.codec is None for tier in tiers[1:]):
        msg = "only the first tier may keep full precision: two such tiers on the device would be one"
        raise PolicyError(msg)
    for tier in tiers:
        if not tier.store.attended:
            msg = (
                f"tier {tier.name!r} lives in store {tier.store.name!r}, which attention cannot read; offloaded tiers "
                f"are not supported yet"
            )
            raise PolicyError(msg)
