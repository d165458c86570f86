"""StreamingLLM (arXiv 2309.17453): attention sinks and the latest tokens, with positions in the cache."""

from collections.abc import Sequence


def kept(length: int, sinks: int = 4, recent: int = 512) -> list[int]:
    """Indices into a cache of ``length`` tokens."""
    return [index for index in range(length) if index < sinks or index >= length - recent]


def kept_for(length: int, coming: int, sinks: int = 4, recent: int = 512) -> list[int]:
    """Indices that leave room for ``coming`` tokens."""
    return kept(length, sinks, recent - coming)


def step(held: Sequence[int], position: int, sinks: int = 4, recent: int = 512) -> list[int]:
    """Positions held after the token at ``position`` came."""
    grown = [*held, position]
    return [grown[index] for index in kept(len(grown), sinks, recent)]


def rotated_at(held: Sequence[int]) -> list[int]:
    """Where RoPE puts the keys held: the place in the cache, whatever the position in the text."""
    return list(range(len(held)))


def kept_after_prompt(length: int, keep: int, sinks: int = 4) -> list[int]:
    """The form of kvpress: once, and the tokens that follow the sinks go."""
    gone = length - keep
    return [index for index in range(length) if index < sinks or index >= sinks + gone]
