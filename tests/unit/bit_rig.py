"""Bit streams as text of ones and zeros: slow writers and readers of the format's two codes."""

from itertools import pairwise

Part = tuple[list[int], int]
"""Numbers, and the width that they are coded with."""


def low_bits(number: int, width: int) -> str:
    """The low bits, the lowest first."""
    return "".join(str(number >> bit & 1) for bit in range(width))


def number_of(text: str) -> int:
    return sum(1 << place for place, bit in enumerate(text) if bit == "1")


def packed(text: str) -> bytes:
    return bytes(number_of(text[begin : begin + 8]) for begin in range(0, len(text), 8))


def unpacked(stream: bytes) -> str:
    return "".join(low_bits(byte, 8) for byte in stream)


def slow_rice(parts: list[Part]) -> tuple[bytes, bytes]:
    gaps = [([after - before - 1 for before, after in pairwise((-1, *part))], width) for part, width in parts]
    quotients = "".join("0" * (gap >> width) + "1" for part, width in gaps for gap in part)
    return packed(quotients), packed("".join(low_bits(gap, width) for part, width in gaps for gap in part))


def slow_golomb(parts: list[Part]) -> bytes:
    text = ""
    for part, width in parts:
        for number in part:
            upper = (number >> width) + 1
            prefix = upper.bit_length() - 1
            text += "0" * prefix + "1" + low_bits(upper, prefix) + low_bits(number, width)
    return packed(text)


class ShortageError(Exception):
    """A stream ended early."""


class Reader:
    """A stream, read bit by bit."""

    def __init__(self, stream: bytes) -> None:
        self._text = unpacked(stream)
        self._at = 0

    def take(self, count: int) -> str:
        if self._at + count > len(self._text):
            raise ShortageError
        self._at += count
        return self._text[self._at - count : self._at]

    def zeros(self) -> int:
        """Zeros before the next one, which is taken too."""
        end = self._text.find("1", self._at)
        if end < 0:
            raise ShortageError
        begin, self._at = self._at, end + 1
        return end - begin

    @property
    def is_spent(self) -> bool:
        """Whether nothing follows but a last byte's zeros."""
        rest = self._text[self._at :]
        return len(rest) < 8 and "1" not in rest


def slow_rice_numbers(
    shape: list[tuple[int, int]], quotients: bytes, lows: bytes, limits: list[int]
) -> list[list[int]] | None:
    unary, remainders = Reader(quotients), Reader(lows)
    result: list[list[int]] = []
    try:
        for (count, width), limit in zip(shape, limits, strict=True):
            part, at = list[int](), -1
            for _ in range(count):
                at += 1 + (unary.zeros() << width) + number_of(remainders.take(width))
                if at >= limit:
                    return None
                part.append(at)
            result.append(part)
    except ShortageError:
        return None
    return result if unary.is_spent and remainders.is_spent else None


def slow_golomb_numbers(shape: list[tuple[int, int]], stream: bytes) -> list[list[int]] | None:
    reader, result = Reader(stream), list[list[int]]()
    try:
        for count, width in shape:
            part: list[int] = []
            for _ in range(count):
                prefix = reader.zeros()
                upper = 1 << prefix | number_of(reader.take(prefix))
                part.append((upper - 1 << width) | number_of(reader.take(width)))
            if any(number >= 2**63 for number in part):
                return None
            result.append(part)
    except ShortageError:
        return None
    return result if reader.is_spent else None
