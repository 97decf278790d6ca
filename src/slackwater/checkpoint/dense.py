"""The ``dense`` body: two bits for each element, for tiles in which many change. Normative page: docs/format.md.

A code says that an element stays (0), goes one place up (1) or down (2) the line, or takes a larger step (3): its new
bits follow after all codes. Loops without branches over whole blocks: what changes where hardly slows them down.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.changes import read_only
from slackwater.checkpoint.jit import kernel, trailing_zeros
from slackwater.checkpoint.refusal import refuse_body
from slackwater.checkpoint.tensor import Bits, Words

LARGER_SHARE: Final = 4
"""With more larger steps than one element in this many, the body isn't worth its time."""

_HEAD: Final = struct.Struct("<I")
"""Larger steps."""
_CODES: Final = 4
"""Codes in a byte, the first one in its lowest bits. Each tile's codes begin a byte."""
_BLOCK: Final = 4096
"""Elements that kernels take at a time: their scratch stays in the nearest cache."""

_Bytes = npt.NDArray[np.uint8]


def encode_dense(olds: Sequence[Bits], news: Sequence[Bits]) -> bytes | None:
    """The body of some tiles; None where too many steps are larger than one place."""
    total = sum(old.size for old in olds)
    larger = np.empty(total // LARGER_SHARE + _BLOCK, dtype=olds[0].dtype)
    packed = [np.empty(_code_bytes(old.size), dtype=np.uint8) for old in olds]
    count = 0
    for old, new, codes in zip(olds, news, packed, strict=True):
        count = _encode_tile(read_only(old), read_only(new), codes, larger, count)
        if not 0 <= count * LARGER_SHARE <= total:
            return None
    return b"".join((_HEAD.pack(count), *(codes.data for codes in packed), larger[:count].data))


def decode_dense(where: str, olds: Sequence[Bits], body: memoryview) -> list[Bits]:
    """The new bits of the tiles that a body was made for.

    Args:
        where: The body's place, for messages.
        olds: The tiles now held, in order.
        body: Hostile until it has been read.

    Raises:
        CorruptError: The body breaks the format.
    """
    if len(body) < _HEAD.size:
        refuse_body(where, "head", f"it needs {_HEAD.size} bytes and the body has {len(body)}")
    (count,) = _HEAD.unpack_from(body)
    lengths = (*(_code_bytes(old.size) for old in olds), count * olds[0].itemsize)
    ends = list(accumulate(lengths, initial=_HEAD.size))
    if ends[-1] != len(body):
        refuse_body(where, "sections", f"they end at byte {ends[-1]} and the body has {len(body)}")
    *packed, tail = (np.frombuffer(body[begin:end], dtype=np.uint8) for begin, end in pairwise(ends))
    larger = tail.copy().view(olds[0].dtype)  # aligned
    news, used = [np.empty(old.size, dtype=old.dtype) for old in olds], 0
    for old, codes, new in zip(olds, packed, news, strict=True):
        if old.size % _CODES and int(codes[-1]) >> 2 * (old.size % _CODES):
            refuse_body(where, "codes", "a last byte isn't filled with zeros")
        used = _decode_tile(read_only(old), codes, larger, used, new)
        if used < 0:
            refuse_body(where, "codes", f"they hold more than {count} larger steps")
    if used != count:
        refuse_body(where, "codes", f"they hold {used} larger steps, not {count}")
    return news


def _code_bytes(elements: int) -> int:
    return (elements + _CODES - 1) // _CODES


def _encode_tile(old: Bits, new: Bits, packed: _Bytes, larger: Bits, count: int) -> int:
    distances, codes = np.empty(_BLOCK, dtype=old.dtype), np.empty(_BLOCK, dtype=np.uint8)
    room = (distances, codes, codes.view(np.uint32), codes.view(np.uint64))
    whole = old.size - old.size % _BLOCK
    count = _encode(old[:whole], new[:whole], *room, packed, larger, count)
    if count < 0 or whole == old.size:
        return count
    # The last block is filled up with elements that stay, whose codes are cut off.
    last, stepped = np.zeros(_BLOCK, dtype=old.dtype), np.zeros(_BLOCK, dtype=old.dtype)
    last[: old.size - whole], stepped[: old.size - whole] = old[whole:], new[whole:]
    tail = np.empty(_BLOCK // _CODES, dtype=np.uint8)
    count = _encode(read_only(last), read_only(stepped), *room, tail, larger, count)
    packed[whole // _CODES :] = tail[: packed.size - whole // _CODES]
    return count


def _decode_tile(old: Bits, packed: _Bytes, larger: Bits, used: int, new: Bits) -> int:
    codes = np.empty(_BLOCK, dtype=np.uint8)
    room = (codes, codes.view(np.uint32), codes.view(np.uint64))
    whole = old.size - old.size % _BLOCK
    used = _decode(old[:whole], packed, *room, larger, used, new[:whole])
    if used < 0 or whole == old.size:
        return used
    last, stepped = np.zeros(_BLOCK, dtype=old.dtype), np.empty(_BLOCK, dtype=old.dtype)
    last[: old.size - whole] = old[whole:]
    tail = np.zeros(_BLOCK // _CODES, dtype=np.uint8)
    tail[: packed.size - whole // _CODES] = packed[whole // _CODES :]
    used = _decode(read_only(last), tail, *room, larger, used, stepped)
    new[whole:] = stepped[: old.size - whole]
    return used


@kernel
def _encode(
    old: Any, new: Any, distances: Any, codes: _Bytes, quads: Any, words: Words, packed: _Bytes, larger: Any, count: int
) -> int:
    """Encode whole blocks. Arithmetic is in the elements' own type, so that the loops fill vector registers.

    Args:
        old: The bits before.
        new: The bits after.
        distances: Room for a block's distances on the line, modulo the width.
        codes: Room for a block's codes, a byte each; ``quads`` and ``words`` are the same memory.
        quads: By four.
        words: By eight.
        packed: Written.
        larger: Written from ``count`` on: the new bits under code 3.
        count: Larger steps so far.

    Returns:
        Larger steps now, or -1 where there is no room for another block's.
    """
    bits = old.dtype.type
    shift, zero, one = bits(8 * old.itemsize - 1), bits(0), bits(1)
    top, below = bits(one << shift), bits(zero - one)
    for block in range(old.size // codes.size):
        first = block * codes.size
        held, made = old[first : first + codes.size], new[first : first + codes.size]
        for lane in range(codes.size):
            before, after = held[lane], made[lane]
            low = bits(before ^ bits(bits(zero - bits(before >> shift)) | top))
            high = bits(after ^ bits(bits(zero - bits(after >> shift)) | top))
            distances[lane] = bits(high - low)
        for lane in range(codes.size):
            step = distances[lane]
            codes[lane] = (
                np.uint8(3) * np.uint8(step != zero) - np.uint8(2) * np.uint8(step == one) - np.uint8(step == below)
            )
        for lane in range(quads.size):
            quad = quads[lane]
            packed[block * quads.size + lane] = np.uint8(
                quad | (quad >> np.uint32(6)) | (quad >> np.uint32(12)) | (quad >> np.uint32(18))
            )
        if count + codes.size > larger.size:
            return -1
        for group in range(words.size // 8):
            mask = _larger_mask(words, group)
            while mask:
                larger[count] = made[group * 64 + trailing_zeros(mask)]
                count += 1
                mask &= mask - np.uint64(1)
    return count


@kernel
def _decode(old: Any, packed: _Bytes, codes: _Bytes, quads: Any, words: Words, larger: Any, used: int, new: Any) -> int:
    """Undo `_encode` for whole blocks.

    Returns:
        How many larger steps are used up, or -1 where there are too few.
    """
    bits = old.dtype.type
    shift, zero, one = bits(8 * old.itemsize - 1), bits(0), bits(1)
    top = bits(one << shift)
    for block in range(old.size // codes.size):
        first = block * codes.size
        held, made = old[first : first + codes.size], new[first : first + codes.size]
        for lane in range(quads.size):
            quad = np.uint32(packed[block * quads.size + lane])
            quads[lane] = (
                quad | (quad << np.uint32(6)) | (quad << np.uint32(12)) | (quad << np.uint32(18))
            ) & np.uint32(0x03030303)
        for lane in range(codes.size):
            before, code = held[lane], codes[lane]
            line = bits(before ^ bits(bits(zero - bits(before >> shift)) | top))
            line = bits(line + bits(bits(code == np.uint8(1)) - bits(code == np.uint8(2))))
            made[lane] = bits(line ^ bits(bits(bits(line >> shift) - one) | top))
        for group in range(words.size // 8):
            mask = _larger_mask(words, group)
            while mask:
                if used == larger.size:
                    return -1
                made[group * 64 + trailing_zeros(mask)] = larger[used]
                used += 1
                mask &= mask - np.uint64(1)
    return used


@kernel
def _larger_mask(words: Words, group: int) -> Any:
    """A one for each of 64 codes that is 3; the product gathers the lowest bits of eight bytes in its highest byte."""
    mask = np.uint64(0)
    for byte in range(8):
        both = words[group * 8 + byte] & (words[group * 8 + byte] >> np.uint64(1)) & np.uint64(0x0101010101010101)
        mask |= ((both * np.uint64(0x0102040810204080)) >> np.uint64(56)) << np.uint64(8 * byte)
    return mask
