"""Guarded loading: whatever a plugin does while it is loaded, the host lives and the cause is on record."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint

import attrs
import pluggy

from qevict.errors import ContractError, PluginError
from qevict.registry import hookspecs
from qevict.registry.checks import checked, name_of
from qevict.registry.kinds import KINDS, Kind, Offered, hook_name, path_of
from qevict.registry.switches import Switches


@attrs.frozen
class Source:
    """Where a part comes from; built-in parts have no entry point."""

    distribution: str
    version: str
    entry_point: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip()

    @property
    def built_in(self) -> bool:
        """Whether it is qevict's own."""
        return not self.entry_point

    @property
    def plugin(self) -> str:
        """The distribution and the entry point, for messages."""
        return f"{self} (entry point {self.entry_point!r})" if self.entry_point else f"{self} (built in)"


@attrs.frozen
class Offer:
    """A class or a preset that passed the checks."""

    kind: Kind
    part: Offered
    source: Source

    @property
    def name(self) -> str:
        """What it is looked up by."""
        return str(getattr(self.part, "__name__" if self.kind == "preset" else "name"))

    def __str__(self) -> str:
        return f"{self.source.plugin}: {path_of(self.part)}"


@attrs.frozen
class Failure:
    """What could not be loaded, and why.

    Attributes:
        source: whose it is.
        cause: the exception, in one line.
        kind: the kind of what is missing; None if the whole plugin is.
        name: the name that it would have had, where known.
    """

    source: Source
    cause: str
    kind: Kind | None = None
    name: str | None = None

    def __str__(self) -> str:
        return f"plugin {self.source.plugin} failed: {self.cause}"


@attrs.frozen
class Haul:
    """What loading brings in, bit by bit."""

    switches: Switches
    offers: list[Offer] = attrs.field(factory=list)
    failures: list[Failure] = attrs.field(factory=list)

    @contextlib.contextmanager
    def guard(self, source: Source, kind: Kind | None = None, name: str | None = None) -> Iterator[None]:
        """Record what goes wrong inside, and send prints to stderr: stdout may be read by machines."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything; only Ctrl-C goes on
            self._record(Failure(source, one_line(error), kind, name), error)

    def tell(self, text: str) -> None:
        """Trace, where wanted."""
        if self.switches.trace:
            sys.stderr.write(f"qevict: {text}\n")

    def refuse(self, offers: Iterable[Offer], error: Exception) -> None:
        """Record that these offers are not taken."""
        for offer in offers:
            self._record(Failure(offer.source, one_line(error), offer.kind, offer.name), error)

    def _record(self, failure: Failure, error: BaseException) -> None:
        if self.switches.reraise:  # a guard inside another one has said it already
            raise error if isinstance(error, PluginError) else PluginError(str(failure)) from error
        self.failures.append(failure)
        self.tell(str(failure))
        if self.switches.trace:
            traceback.print_exception(error)


def load(plugin: Callable[[], object], source: Source, haul: Haul) -> None:
    """Load one plugin and take in whatever it offers."""
    before = len(haul.offers)
    haul.tell(f"loading {source.plugin}")
    with haul.guard(source):
        for kind, hook in _wire(plugin()).items():
            with haul.guard(source, kind):
                _take(kind, hook, source, haul)
    haul.tell(f"{source.plugin} offers {len(haul.offers) - before} parts")


def source_of(entry_point: EntryPoint) -> Source:
    """Whose entry point it is; damaged metadata must not hide a plugin."""
    with contextlib.suppress(Exception):  # no METADATA, no version in it: Pythons disagree on what to raise
        if dist := entry_point.dist:
            return Source(str(dist.name), str(dist.version), entry_point.name)
    return Source("?", "", entry_point.name)


def one_line(error: BaseException) -> str:
    """The exception's type and message, in one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - a plugin's own exception class
        text = ""
    return f"{type(error).__name__}: {text}".rstrip(": ")


def _wire(plugin: object) -> dict[Kind, pluggy.HookCaller]:
    """Find a plugin's hooks, with a manager of its own.

    ``register`` is not atomic, and wrappers see what others return. Apart, a failure leaves nothing to undo
    and no plugin can touch what another one offers.
    """
    manager = pluggy.PluginManager("qevict")
    manager.add_hookspecs(hookspecs)
    allowed = ", ".join(map(hook_name, KINDS))
    try:
        manager.register(plugin)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise ContractError(f"{error}; the hooks are {allowed}, without arguments") from error
    callers = {caller.name: caller for caller in manager.get_hookcallers(plugin) or ()}
    if not callers:
        raise ContractError(
            f"{plugin!r} implements no hook; let the entry point name a module with at least one of "
            f"{allowed}, marked with @qevict.registry.hookimpl"
        )
    return {kind: callers[hook_name(kind)] for kind in KINDS if hook_name(kind) in callers}


def _take(kind: Kind, hook: pluggy.HookCaller, source: Source, haul: Haul) -> None:
    answers = hook()
    offers = answers[0] if answers else None
    if not isinstance(offers, Iterable) or isinstance(offers, str | bytes):
        what = "functions" if kind == "preset" else "classes"
        raise ContractError(f"{hook_name(kind)} returns an iterable of {what}, got {offers!r}")
    for offered in offers:
        with haul.guard(source, kind, name_of(offered)):
            haul.offers.append(Offer(kind, checked(offered, kind), source))
