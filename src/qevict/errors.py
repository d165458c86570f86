"""Every exception that qevict raises on purpose. Each message names what was given, what is allowed and what to do."""


class QevictError(Exception):
    """Root of all qevict errors."""


class PolicyError(QevictError, ValueError):
    """A policy, or a part in it, cannot work as composed."""


class BudgetError(PolicyError):
    """A budget is not positive, not parsable, or more than everything."""


class UnsupportedModelError(QevictError, ValueError):
    """The model cannot be served by a policy; the reason is in the message."""


class UnsupportedOperationError(QevictError, NotImplementedError):
    """The cache cannot do what was asked of it (crop, beam reorder, ...)."""


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
    """No part of that name is registered."""


class DuplicatePartError(QevictError, ValueError):
    """Two distributions offer a part under one name."""


class PluginError(QevictError, RuntimeError):
    """An installed plugin could not be loaded, and one of its parts was asked for."""


class DemoModelError(QevictError, RuntimeError):
    """The demo model could not be fetched, converted or loaded."""
