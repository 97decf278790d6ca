"""Tiles of a source, hashed or compared with a baseline, over threads: the work releases the GIL."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Final, TypeVar

import numpy as np

from slackwater.checkpoint.application import places_at, take
from slackwater.checkpoint.bundles import Batch, Bundle, batches
from slackwater.checkpoint.codec import EncodedBody, Level, encode_body
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.element_sum import element_sum, seed_of
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import InvalidInputError
from slackwater.weights.source import TensorSource

_AHEAD: Final = 4
"""Bodies in flight per thread: enough to keep it busy, few enough to hold little."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def diff(
    source: TensorSource, outline: Outline, baseline: Mapping[str, Bits], *, level: Level, threads: int
) -> Iterator[tuple[Batch, list[EncodedBody]]]:
    """Compare ``source`` with ``baseline``, which has all its tensors with equal specs.

    Yields each batch of bundles with the bodies of those that change, in order, whichever thread is done first.
    """
    planned = list(batches(outline, source.specs()))
    # Some sources make a tensor when it is read, and a large one is read tile by tile.
    read = lru_cache(maxsize=threads + 1)(source.bits)

    def encode(bundle: Bundle) -> EncodedBody | None:
        places = places_at(outline, bundle)
        olds, lives = take(places, baseline.__getitem__), take(places, read)
        # Private copies: what is written meanwhile may spoil this version, never the chain.
        encoded = encode_body(places, olds, [bits.copy() for bits in lives], level)
        for tile in () if encoded is None else encoded.tiles:
            if tile_digest(lives[places.index(tile.place)]) != tile.post:
                raise InvalidInputError(
                    f"{tile.place} was written while it was encoded",
                    hint="let publish() return before the next optimizer step",
                )
        return encoded

    found = _in_order((bundle for batch in planned for bundle in batch), encode, threads)
    for batch in planned:
        bodies = [next(found) for _ in batch]
        yield batch, [body for body in bodies if body is not None]


def hash_source(source: TensorSource, *, threads: int) -> StateTable:
    """The table of a whole source."""
    outline = Outline(source.specs().values())

    def digests(number: int) -> tuple[int, int]:
        spec, tile = outline.place(number)
        bits = tile.take(source.bits(spec.name))
        return tile_digest(bits), element_sum(seed_of(spec.name), tile, bits)

    return table_of(outline, list(_in_order(range(outline.num_tiles), digests, threads)))


def table_of(outline: Outline, found: Sequence[tuple[int, int]]) -> StateTable:
    """A table of the digest and the element sum of each tile, by number."""
    tiles, parts = np.array(found, dtype=np.uint64).reshape(-1, 2).T
    sums = np.zeros(len(outline.specs), dtype=np.uint64)
    tensors = np.repeat(np.arange(sums.size), np.diff(outline.first_tiles))
    np.add.at(sums, tensors, parts)
    return StateTable(outline=outline, tiles=tiles.copy(), sums=sums)


def _in_order(items: Iterable[_Item], work: Callable[[_Item], _Result], threads: int) -> Iterator[_Result]:
    """Results in order, with a bounded number in flight; a consumer that stops early ends the pool."""
    pending: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="tiles") as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) >= threads * _AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
