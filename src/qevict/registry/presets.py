"""Presets: what must hold of a function before it is registered as one, and how it is called."""

import inspect
from types import FunctionType
from typing import Final

from qevict.errors import ContractError
from qevict.policy import Policy
from qevict.registry.kinds import Preset, hook_name, hook_of, path_of

_HOOK: Final = hook_name("preset")
_WORDS_OF_FILES: Final = ("schema", "preset")
_BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def checked_preset(offered: object) -> FunctionType:
    """Return the function that was offered.

    Raises:
        ContractError: it is no function, has no name, or takes an argument that a file cannot give by name.
    """
    if not isinstance(offered, FunctionType):
        raise ContractError(f"{_HOOK} returns functions, got {offered!r}; {_remedy(offered)}")
    if not offered.__name__.isidentifier():
        raise ContractError(f"{path_of(offered)} has no name to know a preset by; write it with def")
    for name, parameter in inspect.signature(offered).parameters.items():
        if parameter.kind not in _BY_NAME:
            raise ContractError(f"{path_of(offered)} takes {parameter}; files give arguments by name, so name each")
        if name in _WORDS_OF_FILES:
            raise ContractError(f"{path_of(offered)} takes {name!r}, which in files means something else; rename it")
    return offered


def policy_of(preset: Preset, **options: object) -> Policy:
    """Call a preset.

    Raises:
        ContractError: it returns something else than a policy.
    """
    policy = preset(**options)
    if not isinstance(policy, Policy):
        raise ContractError(f"preset {preset.__name__!r} returns a Policy, got {policy!r}; mend the plugin")
    return policy


def _remedy(offered: object) -> str:
    if isinstance(offered, Policy):
        return "return the function itself, not what it returns"
    hook = hook_of(offered) if isinstance(offered, type) else None
    return f"offer it from {hook}" if hook else "write it with def"
