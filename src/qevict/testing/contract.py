"""What all contracts share: one part, cases to judge it by, and laws that say what they found."""

import copy
import functools
import traceback
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar, cast

import attrs
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import HypothesisException
from hypothesis.strategies import SearchStrategy

from qevict.registry.checks import checked
from qevict.registry.kinds import CONTRACTS
from qevict.testing.values import Finding, require

PartT = TypeVar("PartT")
CaseT = TypeVar("CaseT")
SelfT = TypeVar("SelfT", bound="Contract[object, object]")
AnyContract = TypeVar("AnyContract")


class LawBroken(AssertionError):  # noqa: N818 - it reads as what it says
    """A part breaks a law of its contract: which one, how it shows, and the smallest case that shows it."""


@attrs.frozen
class Capability:
    """What a part may lack, if it says so.

    Attributes:
        held: whether a part has it.
        otherwise: what a part without it declares; the reason of the skipped test.
    """

    held: Callable[[object], bool]
    otherwise: str


def declares(name: str) -> Capability:
    """The capability that a part declares by a true attribute."""
    return Capability(lambda part: bool(getattr(part, name)), f"declares {name} = False")


def law(
    statement: str, *, given_that: Capability | None = None
) -> Callable[[Callable[[AnyContract, CaseT], None]], Callable[[AnyContract], None]]:
    """Make a test of a method that judges one case: it runs over many cases and reports the smallest that fails.

    Args:
        statement: the law, as the report shall quote it.
        given_that: what a part must be capable of; the test is skipped for a part that declares otherwise.
    """

    def decorate(judge: Callable[[AnyContract, CaseT], None]) -> Callable[[AnyContract], None]:
        def test(contract: AnyContract) -> None:
            __tracebackhide__ = True
            suite = cast("Contract[object, CaseT]", contract)
            _skip_unless(given_that, suite.part)
            _over_cases(suite, statement, functools.partial(judge, contract))

        return _named_like(judge, test)

    return decorate


def plain_law(
    statement: str, *, given_that: Capability | None = None
) -> Callable[[Callable[[AnyContract], None]], Callable[[AnyContract], None]]:
    """Make a test of a method that needs no case.

    Args:
        statement: the law, as the report shall quote it.
        given_that: as for :func:`law`.
    """

    def decorate(judge: Callable[[AnyContract], None]) -> Callable[[AnyContract], None]:
        def test(contract: AnyContract) -> None:
            __tracebackhide__ = True
            suite = cast("Contract[object, object]", contract)
            _skip_unless(given_that, suite.part)
            _judged(suite, statement, "", functools.partial(judge, contract))

        return _named_like(judge, test)

    return decorate


def _over_cases(contract: "Contract[object, CaseT]", statement: str, judge: Callable[[CaseT], None]) -> None:
    __tracebackhide__ = True

    @settings(
        max_examples=contract.examples,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(contract.cases())
    def run(case: CaseT) -> None:
        __tracebackhide__ = True
        _judged(contract, statement, f"\n  smallest case: {case!r}", functools.partial(judge, case))

    run()


def _judged(contract: "Contract[object, CaseT]", statement: str, case: str, judge: Callable[[], None]) -> None:
    """Run a judge; what goes wrong is reported under the name of the law."""
    __tracebackhide__ = True
    try:
        judge()
    except HypothesisException:
        raise
    except Exception as error:  # noqa: BLE001 - a part may raise anything
        finding = error
    else:
        return
    # Raised outside of the handler: an exception without a context is the same failure to Hypothesis, however small.
    broken = LawBroken(
        f"{contract.part!r} breaks a law of its contract\n  law: {statement}\n  found: {_in_words(finding)}{case}"
    )
    if not isinstance(finding, Finding):
        broken.add_note("".join(traceback.format_exception(finding)))
    raise broken


def _in_words(finding: Exception) -> str:
    if isinstance(finding, Finding):
        return str(finding)
    return f"it raised {type(finding).__name__}: {finding}"


def _skip_unless(capability: Capability | None, part: object) -> None:
    if capability is not None and not capability.held(part):
        pytest.skip(f"{part!r} {capability.otherwise}")


def _named_like(judge: Callable[..., None], test: Callable[[AnyContract], None]) -> Callable[[AnyContract], None]:
    """Carry name and docstring over; not the signature, in which pytest would look for fixtures."""
    test.__name__, test.__qualname__ = judge.__name__, judge.__qualname__
    test.__doc__, test.__module__ = judge.__doc__, judge.__module__
    return test


class Contract(Generic[PartT, CaseT]):
    """The laws of one kind of part. Derive a test class from that of your kind, and set ``part``.

    Attributes:
        part: the part that is judged.
        kind: what ``part`` must be an instance of.
        examples: how many cases each law is tried on; fewer for a slow part.
        device: where the tensors of the cases live.
    """

    part: PartT
    kind: ClassVar[type]
    examples: ClassVar[int] = 30
    device: ClassVar[torch.device] = torch.device("cpu")

    def __init_subclass__(cls) -> None:
        """Refuse a test class that tests nothing, as soon as it is written."""
        super().__init_subclass__()
        part = getattr(cls, "part", None)
        if part is None and not cls.__name__.startswith("Test"):
            return  # a contract of its own, to derive from
        if not isinstance(part, cls.kind):
            raise TypeError(
                f"{cls.__qualname__} has {_what_is(part)}; write `part = {_example(part, cls.kind)}` in it, "
                f"an instance of a subclass of {cls.kind.__module__}.{cls.kind.__qualname__}"
            )

    def cases(self) -> SearchStrategy[CaseT]:
        """The cases that the laws are tried on."""
        raise NotImplementedError

    def twin(self) -> PartT:
        """An equal part that shares nothing with ``part``."""
        return copy.deepcopy(self.part)

    @plain_law("A part is a frozen value: equal parts compare and hash equal, and none can be changed.")
    def test_it_is_a_frozen_value(self) -> None:
        twin = self.twin()
        require(twin == self.part, "a copy of it does not compare equal; `@attrs.frozen` makes it so")
        require(hash(twin) == hash(self.part), "a copy of it has another hash; `@attrs.frozen` makes it so")
        try:
            twin.no_such_field = None  # type: ignore[attr-defined]  # that is the question
        except AttributeError:
            return
        require(False, "a field can be set; `@attrs.frozen` prevents it")


class RegisteredContract(Contract[PartT, CaseT]):
    """The laws of a part that a plugin can offer."""

    @plain_law("A part has a name, implements its whole contract, and takes the arguments that its contract passes.")
    def test_the_registry_takes_it(self) -> None:
        kind = next(name for name, contract in CONTRACTS.items() if contract is self.kind)
        checked(type(self.part), kind)


def _what_is(part: object) -> str:
    if part is None:
        return "no part"
    return f"the class {part.__name__} as its part" if isinstance(part, type) else f"{part!r} as its part"


def _example(part: object, kind: type) -> str:
    if isinstance(part, type) and issubclass(part, kind):
        return f"{part.__name__}()"
    return f"My{kind.__name__}()"
