"""Several deltas as one: what is prepared of them so far, on top of the bits in an engine's memory.

A version's bits are read through it before the engine holds them. Memory is that of what changes: the writes to a tile
are put together as they come.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from slackwater.checkpoint.changes import Positions
from slackwater.checkpoint.codec import DENSE_SHARE
from slackwater.checkpoint.tensor import Bits, Tile, TileWrite
from slackwater.engine.base import TileReader
from slackwater.replica.prepare import Check, Prepared

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Touched:
    """What happens to one tile."""

    write: TileWrite
    after: Check
    before: Check


class Overlay:
    """A `TileReader` of the version that the deltas put on it make. One thread calls ``add`` and ``prepared``.

    Args:
        engine: Whose bits lie below. They stay as they are for as long as this is used.
        threads: Tiles put together at once.
    """

    def __init__(self, engine: TileReader, threads: int) -> None:
        self._engine = engine
        self._threads = threads
        self._touched: dict[tuple[str, Tile], _Touched] = {}
        self._steps = 0

    @property
    def num_bytes(self) -> int:
        """Host memory that the writes hold."""
        return sum(touched.write.num_bytes for touched in self._touched.values())

    def read(self, name: str, tile: Tile) -> Bits:
        """See `TileReader.read`. A tile of which some elements change is a copy of the caller's own."""
        touched = self._touched.get((name, tile))
        if touched is None:
            return self._engine.read(name, tile)
        write = touched.write
        return write.values if write.positions is None else _made_whole(self._engine, write)

    def add(self, made: Prepared, *, last: bool) -> None:
        """Put on what was decoded against this overlay.

        Args:
            made: A version's writes.
            last: No more will come. Before that, values are copied out of packs, so that the packs can go.
        """

        def put_together(new: _Touched) -> _Touched:
            old = self._touched.get((new.write.name, new.write.tile))
            write = new.write if old is None else merged(self._engine, old.write, new.write)
            return replace(
                new, write=write if last else _owned(write), before=new.before if old is None else old.before
            )

        self._steps += 1
        for touched in _parallel(put_together, _touched_by(made), self._threads):
            self._touched[touched.write.name, touched.write.tile] = touched

    def prepared(self) -> Prepared:
        """All of it as one version's writes. What ends with the bits that it had in the engine is left out."""
        found: Iterable[_Touched | None] = self._touched.values()
        if self._steps > 1:  # a single delta lists nothing that stays as it was
            found = _parallel(self._without_returns, list(self._touched.values()), self._threads)
        kept = [touched for touched in found if touched is not None]
        return Prepared(
            writes=tuple(touched.write for touched in kept),
            after=tuple(touched.after for touched in kept),
            before=tuple(touched.before for touched in kept),
        )

    def _without_returns(self, touched: _Touched) -> _Touched | None:
        write = touched.write
        held = self._engine.read(write.name, write.tile)
        if write.positions is None:
            return None if np.array_equal(write.values, held) else touched
        differs = write.values != held[write.positions]
        if differs.all():
            return touched
        if not differs.any():
            return None
        fewer = replace(write, positions=write.positions[differs], values=write.values[differs])
        return replace(touched, write=fewer)


def merged(engine: TileReader, old: TileWrite, new: TileWrite) -> TileWrite:
    """One write that does what two do, one after the other, to the same tile of ``engine``."""
    if new.positions is None:
        return new
    if old.positions is None:
        values = old.values.copy()
        values[new.positions] = new.values
        return replace(new, positions=None, values=values)
    positions, values = _union(old.positions, old.values, new.positions, new.values)
    both = replace(new, positions=positions, values=values)
    if positions.size * DENSE_SHARE <= new.tile.count:
        return both
    return replace(both, positions=None, values=_made_whole(engine, both))


def _union(old: Positions, olds: Bits, new: Positions, news: Bits) -> tuple[Positions, Bits]:
    """Two rising lists as one; where both have a position, the second has the value."""
    places = np.searchsorted(new, old)
    again = np.take(new, places, mode="clip") == old if new.size else np.zeros(old.size, dtype=np.bool_)
    old, olds, places = old[~again], olds[~again], places[~again]
    places += np.arange(old.size)
    is_new = np.ones(old.size + new.size, dtype=np.bool_)
    is_new[places] = False
    positions, values = np.empty(is_new.size, dtype=old.dtype), np.empty(is_new.size, dtype=olds.dtype)
    positions[places], values[places] = old, olds
    positions[is_new], values[is_new] = new, news
    return positions, values


def _made_whole(engine: TileReader, write: TileWrite) -> Bits:
    bits = np.array(engine.read(write.name, write.tile))
    bits[write.positions] = write.values
    return bits


def _owned(write: TileWrite) -> TileWrite:
    return write if write.values.flags.owndata else replace(write, values=write.values.copy())


def _touched_by(made: Prepared) -> Iterator[_Touched]:
    for write, after, before in zip(made.writes, made.after, made.before, strict=True):
        yield _Touched(write=write, after=after, before=before)


def _parallel(work: Callable[[_Item], _Result], items: Iterable[_Item], threads: int) -> Iterator[_Result]:
    with ThreadPoolExecutor(threads, thread_name_prefix="overlay") as pool:
        yield from pool.map(work, items)
