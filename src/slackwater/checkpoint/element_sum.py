"""The element sum: a hash of a tensor that shards can add up and that follows a few changes without reading the rest.

::

    seed  = the first 8 bytes of SHA-256 of the tensor's name in UTF-8, little-endian
    h(i, b) = mix((seed + i * 0x9E3779B97F4A7C15) xor b)      i: flat index in the whole tensor, b: the bits there
    mix(z): z *= 0xBF58476D1CE4E5B9; z ^= z >> 32; z *= 0x94D049BB133111EB; z ^= z >> 29
    sum   = the h(i, b) of all elements, added

all modulo 2**64; the constants are those of the SplitMix64 generator (Steele, Lea, Flood 2014). For one element h is a
bijection, so one changed element always changes the sum; an accident that changes several does, but for one in 2**64.
It is no proof against attackers, who are SHA-256's part.
"""

import hashlib
from typing import Any, Final

import numpy as np

from slackwater.checkpoint.changes import Changes, Positions, read_only
from slackwater.checkpoint.jit import kernel
from slackwater.checkpoint.tensor import Bits, Tile, Words

_WEYL: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_MODULUS: Final = 1 << 64


def seed_of(name: str) -> int:
    """The seed of a tensor, 64 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def element_sum(seed: int, tile: Tile, bits: Bits) -> int:
    """The sum over a tile.

    Args:
        seed: Of its tensor: `seed_of`.
        tile: Where it lies.
        bits: Its elements, flat.
    """
    return int(_sum(read_only(bits), np.uint64(seed), tile.start, tile.cols, tile.stride))


def sum_change(seed: int, tile: Tile, changes: Changes) -> int:
    """What to add to the sum, modulo 2**64, when ``changes`` are made in a tile."""
    place = tile.start, tile.cols, tile.stride
    before = _sum_at(changes.positions, changes.old, np.uint64(seed), *place)
    after = _sum_at(changes.positions, changes.new, np.uint64(seed), *place)
    return (int(after) - int(before)) % _MODULUS


def compare_all(seed: int, tile: Tile, old: Bits, new: Bits) -> tuple[int, int]:
    """How many elements of a tile differ, and what to add to the sum, modulo 2**64: by reading all of it."""
    count, moved = _compare(read_only(old), read_only(new), np.uint64(seed), tile.start, tile.cols, tile.stride)
    return int(count), int(moved)


@kernel
def _compare(old: Any, new: Any, seed: Any, start: int, cols: int, stride: int) -> Any:
    count, moved = 0, np.uint64(0)
    for row in range(old.size // cols):
        first = seed + np.uint64(start + row * stride) * _WEYL
        before, after = old[row * cols : (row + 1) * cols], new[row * cols : (row + 1) * cols]
        for col in range(cols):
            key = first + np.uint64(col) * _WEYL
            moved += _mix(key ^ np.uint64(after[col])) - _mix(key ^ np.uint64(before[col]))
            count += before[col] != after[col]
    return count, moved


@kernel
def _sum(bits: Any, seed: Any, start: int, cols: int, stride: int) -> Any:
    total = np.uint64(0)
    for row in range(bits.size // cols):
        first = seed + np.uint64(start + row * stride) * _WEYL
        line = bits[row * cols : (row + 1) * cols]
        for col in range(cols):
            total += _mix((first + np.uint64(col) * _WEYL) ^ np.uint64(line[col]))
    return total


@kernel
def _sum_at(positions: Positions, values: Words, seed: Any, start: int, cols: int, stride: int) -> Any:
    total = np.uint64(0)
    for index in range(positions.size):
        place = np.int64(positions[index])
        if stride:
            place = place // cols * stride + place % cols
        total += _mix((seed + np.uint64(start + place) * _WEYL) ^ values[index])
    return total


@kernel
def _mix(word: Any) -> Any:
    word *= _FIRST
    word ^= word >> np.uint64(32)
    word *= _SECOND
    return word ^ (word >> np.uint64(29))
