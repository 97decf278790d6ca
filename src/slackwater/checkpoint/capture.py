"""What changed in a tile, held until it is encoded: taken in one pass, as fast as memory is read.

A changed element takes two bytes for its place, besides its new bits; a tile that changes so much that this is more
than the tile itself is copied. Unlike `slackwater.checkpoint.changes`, which looks at two tiles that stay as they are,
it reads the new bits once, so that their owner may write them again.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.changes import read_only
from slackwater.checkpoint.jit import differing, kernel, ones, trailing_zeros
from slackwater.checkpoint.tensor import Bits, Tile
from slackwater.errors import InvalidInputError

_CHUNK: Final = 1 << 16
"""Elements whose places inside it are 16 bits wide; two chunks of bf16 fit into a core's own cache."""
_BLOCK: Final = 64
_ONE: Final = np.uint64(1)

_Places = npt.NDArray[np.uint16]
_Counts = npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scattered:
    """The changed elements of a tile, by rising position."""

    counts: _Counts
    """How many there are in each chunk of 65,536 elements."""
    places: _Places
    """Offsets inside their chunks."""
    values: Bits
    """The new bits."""

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.counts.nbytes + self.places.nbytes + self.values.nbytes

    def onto(self, old: Bits) -> Bits:
        """The tile's new bits, made of its old ones: a copy."""
        new = old.copy()
        _put(self.counts, self.places, self.values, new)
        return new


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """All new bits of a tile."""

    values: Bits

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.values.nbytes

    def onto(self, old: Bits) -> Bits:  # noqa: ARG002 : as `Scattered.onto`
        """The tile's new bits."""
        return self.values


Captured = Scattered | Copied


def capture(tile: Tile, old: Bits, new: Bits) -> Captured | None:
    """Read a tile of a tensor that may be written afterwards; None where no bit differs.

    Args:
        tile: Where it lies.
        old: The tensor's bits before, flat.
        new: Its bits now.

    Raises:
        InvalidInputError: They aren't bits of one tensor that has this tile.
    """
    if not (old.shape == new.shape == (new.size,) and old.dtype == new.dtype and tile.fits(new.size)):
        raise InvalidInputError(
            f"tile {tile.index} can't go from {old.dtype} {old.shape} to {new.dtype} {new.shape}",
            hint="a source gives flat bits of its specs' sizes",
        )
    limit = tile.count * new.itemsize // (new.itemsize + np.dtype(np.uint16).itemsize)
    room = min(tile.count, limit + _CHUNK) + _BLOCK
    counts = np.zeros(-(-tile.count // _CHUNK), dtype=np.uint32)
    places, values = np.empty(room, dtype=np.uint16), np.empty(room, dtype=new.dtype)
    line = tile.start, tile.rows, tile.cols, tile.stride
    found = _capture(read_only(old), read_only(new), *line, limit, counts, places, values)
    if found > limit:
        return Copied(values=np.array(tile.take(new)))
    if not found:
        return None
    return Scattered(counts=counts, places=places[:found].copy(), values=values[:found].copy())


@kernel
def _capture(
    old: Any, new: Any, start: int, rows: int, cols: int, stride: int, limit: int,
    counts: _Counts, places: _Places, values: Any,
) -> int:  # fmt: skip
    """Find changes run by run; returns how many there are, or a number above ``limit`` as soon as there are more."""
    total, place = 0, 0
    for row in range(rows):
        col = 0
        while col < cols:
            chunk = place // _CHUNK
            size = min(cols - col, (chunk + 1) * _CHUNK - place)
            found = _scan(old, new, start + row * stride + col, size, place % _CHUNK, places[total:], values[total:])
            counts[chunk] += np.uint32(found)
            total += found
            if total > limit:
                return total
            place += size
            col += size
    return total


@kernel
def _scan(old: Any, new: Any, first: int, size: int, place: int, places: _Places, values: Any) -> int:
    """Changes of one run of elements, which lies in one chunk."""
    count = 0
    for done in range(0, size, _BLOCK):
        begin = first + done
        if begin + _BLOCK <= new.size:
            mask = differing(old, new, begin)
            if size - done < _BLOCK:  # the rest of the block is no part of this run
                mask &= (_ONE << np.uint64(size - done)) - _ONE
        else:
            mask = np.uint64(0)
            for lane in range(size - done):
                mask |= np.uint64(old[begin + lane] != new[begin + lane]) << np.uint64(lane)
        found = ones(mask)
        for index in range(2):  # most blocks have no more, and two stores too many cost less than a wrong guess
            lane = trailing_zeros(mask) & 63
            places[count + index] = np.uint16(place + done + lane)
            values[count + index] = new[min(begin + lane, new.size - 1)]
            mask &= mask - _ONE
        for index in range(2, found):
            lane = trailing_zeros(mask)
            places[count + index] = np.uint16(place + done + lane)
            values[count + index] = new[begin + lane]
            mask &= mask - _ONE
        count += found
    return count


@kernel
def _put(counts: _Counts, places: _Places, values: Any, bits: Any) -> None:
    done = 0
    for chunk in range(counts.size):
        begin = chunk * _CHUNK
        for index in range(done, done + np.int64(counts[chunk])):
            bits[begin + np.int64(places[index])] = values[index]
        done += np.int64(counts[chunk])
