"""What the environment says about plugins."""

import os
import re
from collections.abc import Mapping

import attrs

DISABLE = "QEVICT_DISABLE_PLUGINS"
TRACE = "QEVICT_TRACE_PLUGINS"

_NO = frozenset({"", "0", "false", "no", "off"})
_YES = frozenset({"1", "true", "yes", "on", "all"})


def same_name(text: str) -> str:
    """The form in which two spellings of a name are equal, as package indexes compare them."""
    return re.sub(r"[-_.]+", "-", text.strip()).lower()


@attrs.frozen
class Switches:
    """How plugins are loaded.

    Attributes:
        no_plugins: leave all third-party plugins alone.
        disabled: distributions and entry points that are left alone, each as :func:`same_name` writes it.
        trace: tell on stderr what is loaded, with the traceback of what fails.
        reraise: raise at the first failure in place of recording it.
    """

    no_plugins: bool = False
    disabled: frozenset[str] = frozenset()
    trace: bool = False
    reraise: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Switches":
        """Read ``QEVICT_DISABLE_PLUGINS`` (1, or some names) and ``QEVICT_TRACE_PLUGINS`` (1, or raise)."""
        disable = environment.get(DISABLE, "").strip().lower()
        trace = environment.get(TRACE, "").strip().lower()
        names = () if disable in _NO | _YES else disable.split(",")
        return cls(
            no_plugins=disable in _YES,
            disabled=frozenset(same_name(name) for name in names if name.strip()),
            trace=trace not in _NO,
            reraise=trace == "raise",
        )

    def allow(self, *names: str) -> bool:
        """Whether a plugin that goes by these names may be loaded."""
        return not self.no_plugins and self.disabled.isdisjoint(same_name(name) for name in names)
