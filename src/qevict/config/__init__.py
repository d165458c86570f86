"""Policies in files: TOML becomes a policy, and a policy TOML. The only place where a name becomes an object."""

from qevict.config.files import dumps, load, loads

__all__ = ["dumps", "load", "loads"]
