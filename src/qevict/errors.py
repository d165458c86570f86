"""Every exception that qevict raises on purpose. Each message names what was given, what is allowed and what to do."""

from collections.abc import Iterable

import attrs


class QevictError(Exception):
    """Root of all qevict errors."""


class PolicyError(QevictError, ValueError):
    """A policy, or a part in it, cannot work as composed."""


class BudgetError(PolicyError):
    """A budget is not positive, not parsable, or more than everything."""


@attrs.frozen
class Problem:
    """One thing that is wrong with a policy file.

    Attributes:
        path: where in the file, from its root ``$``: ``$.tiers[1].keys.bits``.
        message: what is wrong, and what would be right.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class PolicyFileError(PolicyError):
    """A policy file cannot become a policy, or a policy no file.

    Attributes:
        problems: everything that is wrong, not only the first of it.
        source: the name of the file; None for text.
    """

    def __init__(self, problems: Iterable[Problem], source: str | None = None) -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__(self.problems, source)

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"{self.source or 'policy'}: {count} problem{'' if count == 1 else 's'}"
        return "\n  ".join([head, *map(str, self.problems)])


class CacheFileError(QevictError, ValueError):
    """A saved cache cannot be read, is damaged, or belongs to another model, dtype or version."""


class UnsupportedModelError(QevictError, ValueError):
    """The model cannot be served by a policy; the reason is in the message."""


class UnsupportedOperationError(QevictError, NotImplementedError):
    """The cache cannot do what was asked of it (assisted decoding, a crop that cannot be exact, ...)."""


class NotAttachedError(QevictError, RuntimeError):
    """A qevict cache is used with a model that no policy is attached to."""


class InterruptedCacheError(QevictError, RuntimeError):
    """A forward over this cache broke off half way; the cache can no longer be trusted."""


class InputError(QevictError, ValueError):
    """The inputs of a forward or of generate are of a kind that a policy cannot honour."""


class BudgetExceededError(QevictError, RuntimeError):
    """A strict policy holds more bytes than its budget allows."""


class ContractError(QevictError, TypeError):
    """A part returned something that its contract forbids."""


class UnknownPartError(QevictError, LookupError):
    """No part or preset of that name is registered."""


class DuplicatePartError(QevictError, ValueError):
    """Two distributions offer a part, or a preset, under one name."""


class PluginError(QevictError, RuntimeError):
    """An installed plugin could not be loaded, and something of it was asked for."""


class ModelError(QevictError, RuntimeError):
    """A model could not be fetched, converted or loaded, or its tokenizer cannot do what is asked."""


class NothingRuledWarning(UserWarning):
    """No layer of the model keeps every token, so that a policy has nothing to decide."""
