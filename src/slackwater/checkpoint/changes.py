"""What differs between two states of a tile: where, and how far on the line of the numbers.

The *line* puts bit patterns in the order of the floating-point numbers that they stand for: ... -1, -0, +0, +1 ...
Training moves most weights to a neighbour, so steps on the line are tiny. The map is a bijection on all patterns of
any width, NaN payloads included; for integers it is merely another bijection.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.jit import differing, kernel, ones, trailing_zeros
from slackwater.checkpoint.tensor import Bits, Words

_BLOCK: Final = 64
_SAMPLES: Final = 64
STRETCH: Final = 1 << 19
"""Elements that are compared at a time: two stretches of them fit into a core's own cache."""
_ONE: Final = np.uint64(1)

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


Watch = Callable[[Bits, Bits], None]
"""Shown each stretch of two tiles while it is in the processor's cache: the place to take digests."""


def find_changes(old: Bits, new: Bits, limit: int | None = None, watch: Watch | None = None) -> Changes | None:
    """Compare two states of one tile: flat, equally long and wide, at most 2**32 - 1 elements.

    Args:
        old: The bits before.
        new: The bits after.
        limit: Give up above so many changes; None never does.
        watch: Shown every stretch, in order, also after giving up.

    Returns:
        The changes, or None where there are more than ``limit``.
    """
    room = _Room.of(min(old.size, STRETCH))
    found, count = list[Changes](), 0
    for begin in range(0, old.size, STRETCH):
        before, after = old[begin : begin + STRETCH], new[begin : begin + STRETCH]
        if watch is not None:
            watch(before, after)
        if limit is None or count <= limit:
            found.append(room.scan(before, after, begin))
            count += found[-1].count
    return None if limit is not None and count > limit else _joined(found)


def sampled_share(old: Bits, new: Bits) -> float:
    """About which share of a tile changes, from some blocks of it: enough to choose how to look at the rest."""
    whole = old.size - old.size % _BLOCK
    step = max(1, whole // _BLOCK // _SAMPLES)
    before, after = (bits[:whole].reshape(-1, _BLOCK)[::step] for bits in (old, new))
    return np.count_nonzero(before != after) / max(before.size, 1)


def _joined(parts: list[Changes]) -> Changes:
    if len(parts) == 1:
        return parts[0]
    empty = np.empty(0, dtype=np.uint64)
    return Changes(
        positions=np.concatenate([empty.astype(np.uint32), *(part.positions for part in parts)]),
        old=np.concatenate([empty, *(part.old for part in parts)]),
        new=np.concatenate([empty, *(part.new for part in parts)]),
    )


@dataclass(frozen=True, slots=True)
class _Room:
    """Scratch for one stretch, used again for the next: what isn't touched costs nothing."""

    positions: Positions
    old: Words
    new: Words

    @classmethod
    def of(cls, elements: int) -> Self:
        size = elements + _BLOCK
        words = np.empty(size, dtype=np.uint64), np.empty(size, dtype=np.uint64)
        return cls(np.empty(size, dtype=np.uint32), *words)

    def scan(self, old: Bits, new: Bits, begin: int) -> Changes:
        count = _scan(read_only(old), read_only(new), begin, self.positions, self.old, self.new)
        return Changes(
            positions=self.positions[:count].copy(), old=self.old[:count].copy(), new=self.new[:count].copy()
        )


def read_only(bits: Bits) -> Bits:
    """The same bits as kernels take them: aligned, side by side (copied only where they aren't), of one numpy type."""
    fixed = bits.view() if bits.flags.aligned and bits.flags.c_contiguous else bits.copy()
    fixed.flags.writeable = False
    return fixed


def gather(bits: Bits, positions: Positions) -> Words:
    """``bits[positions]``, widened."""
    values = np.empty(positions.size, dtype=np.uint64)
    _gather(read_only(bits), positions, values)
    return values


@kernel
def _scan(old: Bits, new: Bits, begin: int, positions: Positions, before: Words, after: Words) -> int:
    """Find changes. A block of 64 becomes one word of flags, so that the processor seldom guesses wrong.

    Args:
        old: The bits before.
        new: The bits after.
        begin: The position of the first element.
        positions: Written; it has room for all elements and a block more.
        before: Written, the old bits there.
        after: Written, the new ones.

    Returns:
        How many changes there are.
    """
    count = 0
    for block in range(old.size // 64):
        first = block * 64
        mask = differing(old, new, first)
        found = ones(mask)
        for index in range(2):  # most blocks have no more, and two stores too many cost less than a wrong guess
            place = first + (trailing_zeros(mask) & 63)
            positions[count + index] = begin + place
            before[count + index] = np.uint64(old[place])
            after[count + index] = np.uint64(new[place])
            mask &= mask - _ONE
        for index in range(2, found):
            place = first + trailing_zeros(mask)
            positions[count + index] = begin + place
            before[count + index] = np.uint64(old[place])
            after[count + index] = np.uint64(new[place])
            mask &= mask - _ONE
        count += found
    for place in range(old.size - old.size % 64, old.size):
        if old[place] != new[place]:
            positions[count] = begin + place
            before[count] = np.uint64(old[place])
            after[count] = np.uint64(new[place])
            count += 1
    return count


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
