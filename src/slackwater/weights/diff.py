"""Tiles of a source, hashed or compared with a baseline, over threads: the work releases the GIL."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from slackwater.checkpoint.codec import EncodedTile, encode_tile
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits, Tile, tiles
from slackwater.weights.source import TensorSource

_AHEAD: Final = 4
"""Tiles in flight per thread: enough to keep it busy, few enough to hold little."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class TileDiff:
    """One tile of a source against its baseline."""

    name: str
    tile: Tile
    encoded: EncodedTile | None
    """None: no bit changed."""
    post: str
    """`tile_digest` of the new bits."""


def diff(source: TensorSource, baseline: Mapping[str, Bits], *, threads: int) -> Iterator[TileDiff]:
    """Compare every tile of ``source`` with ``baseline``, which has all its tensors with equal specs.

    Yields by rising tensor name and tile index, whichever thread is done first.
    """

    def compare(name: str, tile: Tile, new: Bits) -> TileDiff:
        old = baseline[name][tile.start : tile.start + tile.count]
        # A copy, so that body and digest tell of the same bits even if the source is written meanwhile.
        frozen = new.copy()
        return TileDiff(name=name, tile=tile, encoded=encode_tile(old, frozen), post=tile_digest(frozen))

    return _over_tiles(source, compare, threads)


def hash_source(source: TensorSource, *, threads: int) -> StateTable:
    """The table of a whole source."""
    digests: dict[str, list[str]] = {name: [] for name in source.specs()}
    for name, digest in _over_tiles(source, lambda name, _, new: (name, tile_digest(new)), threads):
        digests[name].append(digest)
    return StateTable.of_digests(source.specs(), digests)


def _over_tiles(source: TensorSource, work: Callable[[str, Tile, Bits], _Result], threads: int) -> Iterator[_Result]:
    """Results in order, with a bounded number in flight; a consumer that stops early ends the pool."""
    pending: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="tiles") as pool:
        try:
            for name, tile, bits in _cut(source):
                pending.append(pool.submit(work, name, tile, bits))
                if len(pending) >= threads * _AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _cut(source: TensorSource) -> Iterator[tuple[str, Tile, Bits]]:
    for name, spec in sorted(source.specs().items()):
        bits = source.bits(name)
        for tile in tiles(spec):
            yield name, tile, bits[tile.start : tile.start + tile.count]
