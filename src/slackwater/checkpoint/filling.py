"""Things laid into containers of bounded size, in order."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def filled(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[tuple[T, ...]]:
    """Cut items into runs whose sizes add up to ``limit`` at most; a larger item gets a run of its own."""
    gathered: list[T] = []
    size = 0
    for item in items:
        if gathered and size + size_of(item) > limit:
            yield tuple(gathered)
            gathered, size = [], 0
        gathered.append(item)
        size += size_of(item)
    if gathered:
        yield tuple(gathered)
