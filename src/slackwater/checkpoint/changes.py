"""What differs between two states of a tile: where, and how far on the line of the numbers.

The *line* puts bit patterns in the order of the floating-point numbers that they stand for: ... -1, -0, +0, +1 ...
Training moves most weights to a neighbour, so steps on the line are tiny. The map is a bijection on all patterns of
any width, NaN payloads included; for integers it is merely another bijection.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.jit import kernel, trailing_zeros
from slackwater.checkpoint.tensor import Bits, Words

_WORD_BYTES: Final = 8
_BLOCK: Final = 64
_FIRST_GUESS: Final = 32
_ONE: Final = np.uint64(1)
_GATHER_BITS: Final = np.uint64(0x0102040810204080)

Positions = npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """The elements of one tile that changed, by rising position."""

    positions: Positions
    """Offsets inside the tile."""
    old: Words
    """Bits before, widened."""
    new: Words
    """Bits after, widened."""

    @property
    def count(self) -> int:
        """How many elements changed."""
        return self.positions.size


def find_changes(old: Bits, new: Bits, limit: int | None = None) -> Changes | None:
    """Compare two states of one tile: flat, equally long and wide, at most 2**32 - 1 elements.

    Args:
        old: The bits before.
        new: The bits after.
        limit: Give up above so many changes, without having looked at the rest; None never does.

    Returns:
        The changes, or None where there are more than ``limit``.
    """
    flags = np.empty(_BLOCK, dtype=np.uint8)
    found, at, count = _room(old.size // _FIRST_GUESS), 0, 0
    while True:
        blocks, count = _scan(read_only(old[at:]), read_only(new[at:]), flags, flags.view(np.uint64), at, count, *found)
        at += blocks * _BLOCK
        if limit is not None and count > limit:
            return None
        if at + _BLOCK > old.size:
            break
        found = _twice(found)
    whole = Changes(positions=found[0][:count], old=found[1][:count], new=found[2][:count])
    result = _with_tail(old, new, at, whole)
    return None if limit is not None and result.count > limit else result


_Room = tuple[Positions, Words, Words]


def _room(count: int) -> _Room:
    # Small on purpose: numpy asks for huge pages above 4 MiB, and clearing them costs more than growing twice.
    size = count + _BLOCK
    return np.empty(size, dtype=np.uint32), np.empty(size, dtype=np.uint64), np.empty(size, dtype=np.uint64)


def _twice(found: _Room) -> _Room:
    positions, old, new = found
    return (
        np.concatenate((positions, np.empty_like(positions))),
        np.concatenate((old, np.empty_like(old))),
        np.concatenate((new, np.empty_like(new))),
    )


def _with_tail(old: Bits, new: Bits, begin: int, found: Changes) -> Changes:
    tail = np.flatnonzero(old[begin:] != new[begin:]) + begin
    if tail.size == 0:
        return found
    return Changes(
        positions=np.concatenate((found.positions, tail.astype(np.uint32))),
        old=np.concatenate((found.old, old[tail].astype(np.uint64))),
        new=np.concatenate((found.new, new[tail].astype(np.uint64))),
    )


def read_only(bits: Bits) -> Bits:
    """The same bits as kernels take them: aligned (copied only where they aren't), and of one numpy type."""
    fixed = bits.view() if bits.ctypes.data % _WORD_BYTES == 0 else bits.copy()
    fixed.flags.writeable = False
    return fixed


def gather(bits: Bits, positions: Positions) -> Words:
    """``bits[positions]``, widened."""
    values = np.empty(positions.size, dtype=np.uint64)
    _gather(read_only(bits), positions, values)
    return values


@kernel
def _scan(
    old: Bits, new: Bits, flags: npt.NDArray[np.uint8], words: Words, begin: int, count: int,
    positions: Positions, before: Words, after: Words,
) -> tuple[int, int]:  # fmt: skip
    """Find changes in whole blocks of 64. A block becomes a word of flags, so that the processor seldom guesses wrong.

    Args:
        old: The bits before.
        new: The bits after.
        flags: Room for a block's flags.
        words: The same room.
        begin: The position of the first element.
        count: Changes found so far.
        positions: Written from ``count`` on.
        before: Written from ``count`` on, the old bits there.
        after: Written from ``count`` on, the new ones.

    Returns:
        How many blocks it did before the end or for want of room, and how many changes are found.
    """
    for block in range(old.size // 64):
        if count + 64 > positions.size:
            return block, count
        first = block * 64
        for lane in range(64):
            flags[lane] = np.uint8(old[first + lane] != new[first + lane])
        mask = np.uint64(0)
        for byte in range(8):  # the product gathers the lowest bits of eight bytes in its highest byte
            mask |= ((words[byte] * _GATHER_BITS) >> np.uint64(56)) << np.uint64(8 * byte)
        while mask:
            place = first + trailing_zeros(mask)
            positions[count] = begin + place
            before[count] = np.uint64(old[place])
            after[count] = np.uint64(new[place])
            count += 1
            mask &= mask - _ONE
    return old.size // 64, count


@kernel
def _gather(bits: Bits, positions: Positions, values: Words) -> None:
    for index in range(positions.size):
        values[index] = np.uint64(bits[positions[index]])


@kernel
def scatter(bits: Bits, positions: Positions, values: Words) -> None:
    """Narrow ``values`` into ``bits[positions]``."""
    for index in range(positions.size):
        bits[positions[index]] = values[index]


@kernel
def steps_between(old: Words, new: Words, bits: int, steps: npt.NDArray[np.int64]) -> None:
    """Signed distances on the line of ``bits``-wide patterns, modulo 2**bits."""
    shift = np.uint64(64 - bits)
    for index in range(old.size):
        distance = _on_line(new[index], bits) - _on_line(old[index], bits)
        steps[index] = np.int64(distance << shift) >> np.int64(64 - bits)


@kernel
def steps_onto(old: Words, steps: npt.NDArray[np.int64], bits: int, new: Words) -> None:
    """Undo `steps_between`: the patterns that lie ``steps`` away from ``old``."""
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)
    top = _ONE << np.uint64(bits - 1)
    for index in range(old.size):
        line = (_on_line(old[index], bits) + np.uint64(steps[index])) & mask
        sign = line >> np.uint64(bits - 1)
        new[index] = (line ^ ((sign - _ONE) | top)) & mask


@kernel
def _on_line(pattern: Any, bits: int) -> Any:
    sign = pattern >> np.uint64(bits - 1)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)
    return (pattern ^ ((np.uint64(0) - sign) | (_ONE << np.uint64(bits - 1)))) & mask
