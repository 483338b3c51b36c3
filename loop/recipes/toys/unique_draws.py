"""Random tasks that differ: one is drawn again until there are so many."""

from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from ....store.errors import ConfigError

MOST_MISSES = 10_000
"""Draws in a row that give nothing new: then there is nothing else, or nearly nothing."""

T = TypeVar("T")


def different(
    draw: Callable[[], tuple[Hashable, T] | None],
    count: int,
    *,
    what: str,
    advice: str,
    patience: int = MOST_MISSES,
) -> Iterator[T]:
    """Yield `count` of what `draw` gives, of each key the first.

    It gives a key and what is yielded for it, or None when the draw came to nothing. Raises
    ConfigError after `patience` draws in a row that gave nothing new.

    >>> draws = iter([("a", 1), None, ("a", 2), ("b", 3)])
    >>> list(different(lambda: next(draws), 2, what="letters", advice="ask for fewer"))
    [1, 3]
    """
    seen: set[Hashable] = set()
    missed = 0
    while len(seen) < count:
        if missed == patience:
            raise ConfigError(f"only {len(seen)} of {count} {what} were found; {advice}")
        missed += 1
        drawn = draw()
        if drawn is not None and drawn[0] not in seen:
            missed = 0
            seen.add(drawn[0])
            yield drawn[1]
