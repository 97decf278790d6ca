"""Writes into memory that stays where it is, staged so that the pause is one compiled call each way.

What a commit needs is made beforehand: a table of addresses, with a line for each block of elements that lie near each
other. The call walks the table once. It compares a few blocks with the old bits that were saved, then writes the new
ones: comparing brings their memory into the cache, many cache lines at a time, so that writing costs little more. A few
blocks are written only if all of them agree; if one doesn't, those before are put back. A commit is all or nothing.

A changed element takes two bytes for its place, besides its old and its new bits. `benchmarks/swap.py` measures it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.changes import Positions, find_changes, read_only
from slackwater.checkpoint.jit import array_at, kernel
from slackwater.checkpoint.tensor import Bits, Tile, TileWrite
from slackwater.errors import InvalidInputError

BLOCK: Final = 512
"""Most changed elements of a block."""
STRETCH: Final = 1 << 16
"""Elements of memory that a block's places count in."""
RUN: Final = 1024
"""Most elements of a block that is written whole."""
GROUP: Final = 8
"""Blocks that are compared before the first of them is written: their memory fits into a core's second cache."""

DENSE_SHARE: Final = 5
"""A tile of which more than one element in so many changes is written whole: there it is the faster way."""
_MOST_POSITIONS: Final = 1 << 32
"""Positions are 32 bits wide."""

_TARGET, _PLACES, _OLD, _NEW, _COUNT, _WIDTH = range(6)
"""Columns of a table: four addresses (places: 0 where the block is written whole), elements, bytes of an element."""
_COLUMNS: Final = 6
_WIDTH_8, _WIDTH_16, _WIDTH_32 = 1, 2, 4

_Table = npt.NDArray[np.int64]
"""Shape [blocks, 6]."""


class Aim(NamedTuple):
    """A write, and the memory that it is for."""

    bits: Bits
    """All elements of its tensor, flat."""
    write: TileWrite

    def check(self) -> None:
        """Refuse a write that doesn't fit.

        Raises:
            InvalidInputError: Its tile, positions or values aren't the tensor's, or the memory can't be written.
        """
        bits, write = self
        where = f"{write.name}: the write to tile {write.tile.index}"
        if not (bits.ndim == 1 and bits.flags.c_contiguous and bits.flags.aligned and bits.flags.writeable):
            raise InvalidInputError(f"{where} is for memory that isn't flat, aligned and writable")
        if not write.tile.fits(bits.size):
            raise InvalidInputError(f"{where} ends outside of its {bits.size} elements")
        if write.values.dtype != bits.dtype:
            raise InvalidInputError(f"{where} carries {write.values.dtype}, the tensor holds {bits.dtype}")
        wanted = write.tile.count if write.positions is None else write.positions.size
        if write.values.shape != (wanted,):
            raise InvalidInputError(f"{where} carries {write.values.shape} values for {wanted} positions")
        if write.positions is None or not write.positions.size:
            return
        rising = bool(np.all(write.positions[1:] > write.positions[:-1]))
        if not rising or not 0 <= int(write.positions[0]) <= int(write.positions[-1]) < write.tile.count:
            raise InvalidInputError(f"{where} has positions out of order or outside of its {write.tile.count} elements")


class _Laid(NamedTuple):
    """A write's lines, and the arrays that they lead to."""

    table: _Table
    parts: tuple[Bits, ...]
    """The new values come last."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagedScatter:
    """Writes as a table of addresses, with everything that the addresses lead to. Made by `of` and by nothing else.

    It holds the targets, new values, places and old bits, so that none of them is freed before the value itself is.
    Nobody may resize the targets in place meanwhile.
    """

    table: _Table
    firsts: npt.NDArray[np.int64]
    """The first line of each write."""
    targets: tuple[Bits, ...]
    """The memory that is written: not ours."""
    parts: tuple[Bits, ...]
    """Places, old bits and new values."""
    bytes_written: int
    """By a commit, and by an undo."""

    @classmethod
    def of(cls, aims: Sequence[Aim]) -> Self:
        """Check writes, save the bits that they will replace, and lay out the table. Nothing changes yet.

        Args:
            aims: Writes of which no two have an element in common. Their values are referred to, not copied, where
                they lie side by side: they must stay as they are.

        Raises:
            InvalidInputError: A write doesn't fit its tensor, or a target isn't flat, aligned and writable memory.
        """
        for aim in aims:
            aim.check()
        laid = [_lay_out(aim) for aim in map(_thinned, aims)]
        ends = np.cumsum([0, *(len(item.table) for item in laid)], dtype=np.int64)
        return cls(
            table=np.concatenate([np.empty((0, _COLUMNS), dtype=np.int64), *(item.table for item in laid)]),
            firsts=ends[:-1],
            targets=tuple(aim.bits for aim in aims),
            parts=tuple(part for item in laid for part in item.parts),
            bytes_written=sum(item.parts[-1].nbytes for item in laid),
        )

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return self.table.nbytes + self.firsts.nbytes + sum(part.nbytes for part in self.parts)

    def commit(self) -> int | None:
        """Write the new values, all or nothing: where memory isn't as it was staged, what was written is put back.

        Releases the GIL. Nobody else may write the targets meanwhile.

        Returns:
            None once everything is written, or which write's memory differed: an index into the ``aims`` of `of`.
        """
        line = _commit(self.table)
        return None if line < 0 else int(np.searchsorted(self.firsts, line, side="right")) - 1

    def undo(self) -> None:
        """Write the old bits, whatever the memory holds: this is also what repairs a commit that was spoilt."""
        _put_back(self.table, len(self.table))


def warm(dtypes: Iterable[np.dtype[np.unsignedinteger[Any]]]) -> None:
    """Compile the kernels, or load them from the disk, before a pause would wait for it.

    Args:
        dtypes: Of the bits that will be written.
    """
    for dtype in set(dtypes):
        bits = np.zeros(1, dtype=dtype)
        write = TileWrite(name="warm", tile=Tile(index=0, start=0, cols=1), positions=None, values=bits + dtype.type(1))
        staged = StagedScatter.of([Aim(bits, write)])
        staged.commit()
        staged.undo()


def _thinned(aim: Aim) -> Aim:
    """A write of a whole tile, as an anchor's are, as one of its changed elements where they are few."""
    tile = aim.write.tile
    if aim.write.positions is not None or tile.count >= _MOST_POSITIONS:
        return aim
    changes = find_changes(tile.take(aim.bits), aim.write.values, tile.count // DENSE_SHARE)
    if changes is None:
        return aim
    values = changes.new.astype(aim.bits.dtype)
    return Aim(aim.bits, replace(aim.write, positions=changes.positions, values=values))


def _lay_out(aim: Aim) -> _Laid:
    return _whole(aim) if aim.write.positions is None else _sparse(aim, aim.write.positions)


def _sparse(aim: Aim, positions: Positions) -> _Laid:
    width, where = aim.bits.itemsize, aim.write.tile.in_tensor(positions)
    stretches, places = where // STRETCH, (where % STRETCH).astype(np.uint16)
    old, new = aim.bits[where], read_only(aim.write.values)
    begins = np.union1d(np.flatnonzero(np.diff(stretches, prepend=-1)), np.arange(0, where.size, BLOCK))
    table = np.empty((begins.size, _COLUMNS), dtype=np.int64)
    table[:, _TARGET] = _address(aim.bits) + stretches[begins] * STRETCH * width
    table[:, _PLACES] = _address(places) + begins * places.itemsize
    table[:, _OLD] = _address(old) + begins * width
    table[:, _NEW] = _address(new) + begins * width
    table[:, _COUNT] = np.diff(begins, append=where.size)
    table[:, _WIDTH] = width
    return _Laid(table, (places, old, new))


def _whole(aim: Aim) -> _Laid:
    tile, width = aim.write.tile, aim.bits.itemsize
    old, new = np.array(tile.take(aim.bits)), read_only(aim.write.values)
    rows, cols = np.arange(tile.rows)[:, None], np.arange(0, tile.cols, RUN)
    inside = (rows * tile.cols + cols).ravel()
    table = np.empty((inside.size, _COLUMNS), dtype=np.int64)
    table[:, _TARGET] = _address(aim.bits) + (tile.start + rows * tile.stride + cols).ravel() * width
    table[:, _PLACES] = 0
    table[:, _OLD] = _address(old) + inside * width
    table[:, _NEW] = _address(new) + inside * width
    table[:, _COUNT] = np.tile(np.minimum(RUN, tile.cols - cols), tile.rows)
    table[:, _WIDTH] = width
    return _Laid(table, (old, new))


def _address(bits: Bits) -> int:
    return bits.ctypes.data


@kernel
def _commit(table: _Table) -> int:
    """Compare and write every line, a group at a time.

    Returns:
        -1, or the first line that differed; those before it are put back then.
    """
    for begin in range(0, len(table), GROUP):
        end = min(begin + GROUP, len(table))
        for line in range(begin, end):
            if not _agrees(table, line):
                _put_back(table, begin)
                return line
        for line in range(begin, end):
            _write(table, line, _NEW)
    return -1


@kernel
def _put_back(table: _Table, lines: int) -> None:
    """Write the old bits of the first ``lines`` lines."""
    for line in range(lines):
        _write(table, line, _OLD)


@kernel
def _agrees(table: _Table, line: int) -> bool:
    """Whether a block holds its old bits."""
    width = table[line, _WIDTH]
    if width == _WIDTH_8:
        return _agrees_as(table, line, np.uint8)
    if width == _WIDTH_16:
        return _agrees_as(table, line, np.uint16)
    if width == _WIDTH_32:
        return _agrees_as(table, line, np.uint32)
    return _agrees_as(table, line, np.uint64)


@kernel
def _write(table: _Table, line: int, column: int) -> None:
    """Write a block's bits of one column."""
    width = table[line, _WIDTH]
    if width == _WIDTH_8:
        _write_as(table, line, column, np.uint8)
    elif width == _WIDTH_16:
        _write_as(table, line, column, np.uint16)
    elif width == _WIDTH_32:
        _write_as(table, line, column, np.uint32)
    else:
        _write_as(table, line, column, np.uint64)


@kernel
def _agrees_as(table: _Table, line: int, dtype: Any) -> bool:
    count = table[line, _COUNT]
    bits = array_at(table[line, _TARGET], STRETCH, dtype)
    old = array_at(table[line, _OLD], count, dtype)
    differing = dtype(0)
    if table[line, _PLACES]:
        places = array_at(table[line, _PLACES], count, np.uint16)
        for index in range(count):
            differing |= bits[places[index]] ^ old[index]
    else:
        for index in range(count):
            differing |= bits[index] ^ old[index]
    return differing == 0


@kernel
def _write_as(table: _Table, line: int, column: int, dtype: Any) -> None:
    count = table[line, _COUNT]
    bits = array_at(table[line, _TARGET], STRETCH, dtype)
    values = array_at(table[line, column], count, dtype)
    if table[line, _PLACES]:
        places = array_at(table[line, _PLACES], count, np.uint16)
        for index in range(count):
            bits[places[index]] = values[index]
    else:
        for index in range(count):
            bits[index] = values[index]
