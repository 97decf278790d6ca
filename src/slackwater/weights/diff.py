"""Tiles of a source, hashed or compared with a baseline, over threads: the work releases the GIL."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeVar

import numpy as np

from slackwater.checkpoint.application import places_at, take
from slackwater.checkpoint.bundles import Batch, batches
from slackwater.checkpoint.capture import Captured, capture
from slackwater.checkpoint.codec import EncodedBody, Level, encode_body
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.element_sum import element_sum, seed_of
from slackwater.checkpoint.nans import has_nan
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.pieces import WHOLE, Pieces, locate
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits
from slackwater.weights.glimpse import Glimpse, glimpse
from slackwater.weights.source import Shows, TensorSource

_AHEAD: Final = 4
"""Items in flight per thread: enough to keep it busy, few enough to hold little."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A batch of bundles whose source has been read."""

    batch: Batch
    bundles: tuple[tuple[Captured | None, ...], ...]
    """What changed, for each tile of each bundle."""
    glimpses: tuple[Glimpse, ...]
    """Some of what was read, where the source may be written meanwhile."""

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(tile.num_bytes for bundle in self.bundles for tile in bundle if tile is not None)


def compare(
    source: TensorSource, outline: Outline, baseline: Mapping[str, Bits], *, threads: int, pieces: Pieces = WHOLE
) -> Iterator[Compared]:
    """Read ``source`` once, beside ``baseline``, which has all its tensors with equal specs. Yields batches in order.

    Args:
        source: The state after.
        outline: The run's.
        baseline: The state before.
        threads: Tiles compared at once.
        pieces: What both have of the tensors.

    Raises:
        InvalidInputError: A tensor's bits aren't those of its spec.
    """
    planned = list(batches(outline, source.specs(), pieces))
    # Some sources make a tensor when it is read, and a large one is read tile by tile.
    read = lru_cache(maxsize=threads + 1)(source.bits)
    shown = source.shows if isinstance(source, Shows) else _nothing

    def look(number: int) -> tuple[Captured | None, Glimpse | None]:
        spec, tile = outline.place(number)
        tile, bits = locate(spec, tile, pieces), read(spec.name)
        seen = glimpse(spec.name, tile, bits) if shown(spec.name) else None  # before the rest: it may be written
        return capture(tile, baseline[spec.name], bits), seen

    found = _in_order((number for batch in planned for bundle in batch for number in bundle), look, threads)
    for batch in planned:
        bundles = [[next(found) for _ in bundle] for bundle in batch]
        yield Compared(
            batch=batch,
            bundles=tuple(tuple(captured for captured, _ in bundle) for bundle in bundles),
            glimpses=tuple(seen for bundle in bundles for _, seen in bundle if seen is not None),
        )


def encode(
    compared: Iterable[Compared],
    outline: Outline,
    baseline: Mapping[str, Bits],
    *,
    level: Level,
    threads: int,
    pieces: Pieces = WHOLE,
) -> Iterator[list[EncodedBody]]:
    """Encode what `compare` read; yields for each batch the bodies that change something, whichever is done first.

    Args:
        compared: Batches.
        outline: The run's.
        baseline: What they were compared with.
        level: How much time to spend for how many bytes.
        threads: Bodies encoded at once.
        pieces: What the baseline has of the tensors.
    """
    waiting = list(compared)

    def work(bundle: Sequence[int], tiles: Sequence[Captured | None]) -> EncodedBody | None:
        if all(tile is None for tile in tiles):
            return None
        places = places_at(outline, bundle)
        olds = take(places, baseline.__getitem__, pieces)
        news = [old if tile is None else tile.onto(old) for old, tile in zip(olds, tiles, strict=True)]
        return encode_body(places, olds, news, level)

    pairs = (pair for item in waiting for pair in zip(item.batch, item.bundles, strict=True))
    found = _in_order(pairs, lambda pair: work(*pair), threads)
    for item in waiting:
        bodies = [next(found) for _ in item.batch]
        yield [body for body in bodies if body is not None]


def _nothing(_: str) -> bool:
    return False


def hash_source(source: TensorSource, *, threads: int) -> StateTable:
    """The table of a whole source."""
    outline = Outline(source.specs().values())

    def digests(number: int) -> tuple[int, int]:
        spec, tile = outline.place(number)
        bits = tile.take(source.bits(spec.name))
        return tile_digest(bits), element_sum(seed_of(spec.name), tile, bits)

    return table_of(outline, list(_in_order(range(outline.num_tiles), digests, threads)))


def find_nans(source: TensorSource, *, threads: int) -> list[str]:
    """The tensors that hold NaN, by rising name."""
    specs = source.specs()
    found = _in_order(specs, lambda name: has_nan(specs[name].dtype, source.bits(name)), threads)
    return [name for name, is_nan in zip(specs, found, strict=True) if is_nan]


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
