"""Bit streams of small numbers: Rice codes in two streams, and exponential Golomb codes. Normative: docs/format.md.

A Rice code of width *k* splits a number into a quotient and *k* low bits. All quotients lie in one stream, in unary
(as many zeros, then a one), and all low bits in another: so decoding is counting zeros, without a branch per number.
R. Rice, J. Plaunt 1971; for a geometric source the best *k* is within 0.03 bits of the entropy.

An exponential Golomb code of width *k* (as in H.264, 9.1) suits long tails.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.jit import kernel, leading_zeros, trailing_zeros
from slackwater.checkpoint.tensor import Words

MAX_WIDTH: Final = 24
"""Widest low part, so that no sum of hostile quotients leaves 63 bits."""

Numbers = npt.NDArray[np.int64]

_WORD: Final = 64
_MOST_BITS: Final = 63
"""Most bits of a number: a code's prefix and width together."""
_LN2: Final = math.log(2)
_ONE: Final = np.uint64(1)


def rice_width(count: int, total: int) -> int:
    """The width that suits ``count`` numbers with sum ``total``: the rule for a geometric source."""
    if count == 0 or total <= count * _LN2 / 2:
        return 0
    return min(MAX_WIDTH, max(0, round(math.log2(total / count * _LN2))))


def golomb_width(numbers: Numbers) -> int:
    """A width that makes the exponential Golomb codes of ``numbers`` short: the first valley of the cost."""
    best = _golomb_bits(numbers, 0)
    for width in range(1, MAX_WIDTH + 1):
        cost = _golomb_bits(numbers, width)
        if cost >= best:
            return width - 1
        best = cost
    return MAX_WIDTH


def rice_bytes(parts: Sequence[tuple[Numbers, int]]) -> tuple[bytes, bytes]:
    """Code rising numbers with a width for each part: the stream of quotients and the stream of low bits."""
    low_bits = [part.size * width for part, width in parts]
    quotients = _words_for(sum(part.size + (_span(part) >> width) for part, width in parts))
    lows = _words_for(sum(low_bits))
    bit = 0
    for (part, width), low_bit in zip(parts, accumulate(low_bits, initial=0), strict=False):
        bit = _write_rice(part, width, quotients, bit, lows, low_bit)
    return _to_bytes(quotients, bit), _to_bytes(lows, sum(low_bits))


def rice_numbers(
    parts: Sequence[tuple[Numbers, int]], quotients: memoryview, lows: memoryview, limits: Sequence[int]
) -> bool:
    """Undo `rice_bytes` into the parts' arrays.

    Args:
        parts: Arrays to write, with their widths.
        quotients: Hostile until it has been read.
        lows: As many bytes as the parts' widths ask for.
        limits: For each part, what its numbers must stay below.

    Returns:
        Whether the streams are whole, end with the last number, and keep the limits.
    """
    unary, remainders = _from_bytes(quotients), _from_bytes(lows)
    bit = low_bit = 0
    for (part, width), limit in zip(parts, limits, strict=True):
        bit = _read_rice(part, width, unary, bit, remainders, low_bit, limit)
        low_bit += part.size * width
        if bit < 0:
            return False
    return _is_padded(unary, bit, len(quotients)) and _is_padded(remainders, low_bit, len(lows))


def golomb_bytes(parts: Sequence[tuple[Numbers, int]]) -> bytes:
    """Code numbers with a width for each part: one stream."""
    bits = [_golomb_bits(part, width) for part, width in parts]
    stream = _words_for(sum(bits))
    for (part, width), bit in zip(parts, accumulate(bits, initial=0), strict=False):
        _write_golomb(part, width, stream, bit)
    return _to_bytes(stream, sum(bits))


def golomb_numbers(parts: Sequence[tuple[Numbers, int]], stream: memoryview) -> bool:
    """Undo `golomb_bytes` into the parts' arrays; returns whether the stream is whole and ends with the last number."""
    words, bit = _from_bytes(stream), 0
    for part, width in parts:
        bit = _read_golomb(part, width, words, bit, 8 * len(stream))
        if bit < 0:
            return False
    return _is_padded(words, bit, len(stream))


def signs_bytes(steps: Numbers) -> bytes:
    """A one for each step below zero."""
    return np.packbits(steps < 0, bitorder="little").tobytes()


def read_signs(steps: Numbers, section: memoryview) -> bool:
    """Undo `signs_bytes`: fill ``steps`` with 1 and -1; returns whether the last byte is filled with zeros."""
    words = _from_bytes(section)
    _fill_signs(steps, words)
    return _is_padded(words, steps.size, len(section))


def _span(rising: Numbers) -> int:
    """The sum of its gaps."""
    return int(rising[-1]) + 1 - rising.size if rising.size else 0


def _words_for(bits: int) -> Words:
    """A zeroed stream with room for ``bits`` and one spare word, which readers may look into."""
    return np.zeros(bits // _WORD + 2, dtype=np.uint64)


def _to_bytes(words: Words, bits: int) -> bytes:
    """The first ``bits`` of a stream in whole bytes; the last one is filled with zeros."""
    return words.view(np.uint8)[: (bits + 7) // 8].tobytes()


def _from_bytes(section: memoryview) -> Words:
    """A stream out of a body, copied so that its words are aligned and followed by zeros."""
    words = _words_for(len(section) * 8)
    words.view(np.uint8)[: len(section)] = np.frombuffer(section, dtype=np.uint8)
    return words


def _is_padded(words: Words, bits: int, length: int) -> bool:
    """Whether a stream of ``length`` bytes is as long as its ``bits`` need, and the rest of its last byte is zero."""
    return length == (bits + 7) // 8 and int(words[bits // _WORD]) >> (bits % _WORD) == 0


@kernel
def _write_rice(rising: Numbers, width: int, quotients: Words, bit: int, lows: Words, low_bit: int) -> int:
    """Code the gaps of ``rising``, where the number before the first is -1.

    Args:
        rising: Strictly rising positions.
        width: Low bits of each gap.
        quotients: Unary stream, zeroed from ``bit`` on.
        bit: Where to begin in it.
        lows: Stream of low bits, zeroed from ``low_bit`` on.
        low_bit: Where to begin in it.

    Returns:
        The bit after the last one in ``quotients``.
    """
    before = -1
    mask = (_ONE << np.uint64(width)) - _ONE
    for index in range(rising.size):
        gap = rising[index] - before - 1
        before = rising[index]
        bit += gap >> width
        quotients[bit >> 6] |= _ONE << np.uint64(bit & 63)
        bit += 1
        if width:
            low, shift = np.uint64(gap) & mask, np.uint64(low_bit & 63)
            lows[low_bit >> 6] |= low << shift
            lows[(low_bit >> 6) + 1] |= (low >> _ONE) >> (np.uint64(63) - shift)
            low_bit += width
    return bit


@kernel
def _read_rice(rising: Numbers, width: int, quotients: Words, bit: int, lows: Words, low_bit: int, limit: int) -> int:
    """Undo `_write_rice`.

    Returns:
        The bit after the last one in ``quotients``; -1 if the stream ends early or a position reaches ``limit``.
    """
    if rising.size == 0:
        return bit
    index, before, at = 0, bit - 1, -1
    mask = (_ONE << np.uint64(width)) - _ONE
    for place in range(bit >> 6, quotients.size):
        word = quotients[place]
        if place == bit >> 6:
            word = (word >> np.uint64(bit & 63)) << np.uint64(bit & 63)
        while word:
            found = (place << 6) + trailing_zeros(word)
            word &= word - _ONE
            shift = np.uint64(low_bit & 63)
            low = (lows[low_bit >> 6] >> shift) | ((lows[(low_bit >> 6) + 1] << _ONE) << (np.uint64(63) - shift))
            low_bit += width
            at += ((found - before - 1) << width) + np.int64(low & mask) + 1
            before = found
            if at >= limit:
                return -1
            rising[index] = at
            index += 1
            if index == rising.size:
                return found + 1
    return -1


@kernel
def _golomb_bits(numbers: Numbers, width: int) -> int:
    """How many bits `_write_golomb` writes."""
    bits = 0
    for index in range(numbers.size):
        bits += 127 - 2 * leading_zeros((np.uint64(numbers[index]) >> np.uint64(width)) + _ONE) + width
    return bits


@kernel
def _write_golomb(numbers: Numbers, width: int, stream: Words, bit: int) -> int:
    """Code ``numbers``, each below 2**63: with ``u = (number >> width) + 1`` and ``p`` its bits less one,
    ``p`` zeros, a one, the low ``p`` bits of ``u``, then the low ``width`` bits of the number.

    Returns:
        The bit after the last one.
    """
    for index in range(numbers.size):
        upper = (np.uint64(numbers[index]) >> np.uint64(width)) + _ONE
        prefix = 63 - leading_zeros(upper)
        bit = _write(
            stream, bit + prefix, (upper << _ONE | _ONE) & ((_ONE << np.uint64(prefix + 1)) - _ONE), prefix + 1
        )
        bit = _write(stream, bit, np.uint64(numbers[index]) & ((_ONE << np.uint64(width)) - _ONE), width)
    return bit


@kernel
def _read_golomb(numbers: Numbers, width: int, stream: Words, bit: int, limit: int) -> int:
    """Undo `_write_golomb`.

    Args:
        numbers: Written.
        width: Low bits of each number.
        stream: Hostile.
        bit: Where to begin in it.
        limit: Its length in bits.

    Returns:
        The bit after the last one; -1 if the stream ends early or a number has more than 63 bits.
    """
    for index in range(numbers.size):
        if bit >= limit:
            return -1
        window = _window(stream, bit)
        prefix = trailing_zeros(window)
        length = 2 * prefix + 1 + width
        if prefix + width > _MOST_BITS or bit + length > limit:
            return -1
        if length > _WORD:
            window = _window(stream, bit + prefix + 1)
        else:
            window >>= np.uint64(prefix + 1)
        upper = (_ONE << np.uint64(prefix)) | (window & ((_ONE << np.uint64(prefix)) - _ONE))
        low = (window >> np.uint64(prefix)) & ((_ONE << np.uint64(width)) - _ONE)
        numbers[index] = np.int64(((upper - _ONE) << np.uint64(width)) | low)
        if numbers[index] < 0:
            return -1
        bit += length
    return bit


@kernel
def _write(stream: Words, bit: int, value: Any, count: int) -> int:
    if count:
        shift = np.uint64(bit & 63)
        stream[bit >> 6] |= value << shift
        stream[(bit >> 6) + 1] |= (value >> _ONE) >> (np.uint64(63) - shift)
    return bit + count


@kernel
def _window(stream: Words, bit: int) -> Any:
    """The 64 bits from ``bit`` on."""
    shift = np.uint64(bit & 63)
    return (stream[bit >> 6] >> shift) | ((stream[(bit >> 6) + 1] << _ONE) << (np.uint64(63) - shift))


@kernel
def _fill_signs(steps: Numbers, words: Words) -> None:
    for index in range(steps.size):
        steps[index] = 1 - 2 * np.int64((words[index >> 6] >> np.uint64(index & 63)) & _ONE)
