"""The arithmetic under the codec: ordered integers, zigzag steps and byte planes. Bijections, one and all."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.tensor import Bits

_BYTE: Final = 8

_Words = npt.NDArray[Any]
"""`Bits` inside this module: numpy's types don't know that unsigned and int stay unsigned."""


def steps_between(old: Bits, new: Bits) -> Bits:
    """Zigzag distances from ``old`` to ``new`` on the ordered line, modulo 2 to the width."""
    return _zigzag(_ordered(new) - _ordered(old))


def steps_onto(old: Bits, steps: Bits) -> Bits:
    """Undo `steps_between`: the bits that lie ``steps`` away from ``old``."""
    return _unordered(_ordered(old) + _unzigzag(steps))


def _zigzag(steps: _Words) -> _Words:
    return (steps << 1) ^ _sign(steps)


def _unzigzag(steps: _Words) -> _Words:
    return (steps >> 1) ^ np.negative(steps & 1)


def _sign(bits: _Words) -> _Words:
    """All ones where the top bit is set, else zero."""
    signed: _Words = bits.view(f"<i{bits.itemsize}")
    return (signed >> (_BYTE * bits.itemsize - 1)).view(bits.dtype)


def _top(bits: _Words) -> int:
    return 1 << (_BYTE * bits.itemsize - 1)


def _ordered(bits: _Words) -> _Words:
    """Map sign and magnitude to an integer that rises with the number: -0 and +0 become neighbours."""
    return bits ^ (_sign(bits) | _top(bits))


def _unordered(line: _Words) -> _Words:
    return line ^ (~_sign(line) | _top(line))


def narrowest(gaps: npt.NDArray[np.int64]) -> Bits:
    """Gaps of 0 to 2**32 - 1 in the narrowest of 1, 2 and 4 bytes that holds them all."""
    largest = int(gaps.max())
    width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
    return gaps.astype(f"<u{width}")


def split_planes(values: Bits) -> list[bytes]:
    """Byte 0 of every value, then byte 1 of every value, and so on: like bytes compress well together."""
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    return [rows[:, index].tobytes() for index in range(values.itemsize)]


def join_planes(planes: Sequence[bytes], dtype: np.dtype[np.unsignedinteger[Any]]) -> Bits:
    """Undo `split_planes`; as many planes as ``dtype`` has bytes, all equally long."""
    rows = np.empty((len(planes[0]), dtype.itemsize), dtype=np.uint8)
    for index, plane in enumerate(planes):
        rows[:, index] = np.frombuffer(plane, dtype=np.uint8)
    return rows.reshape(-1).view(dtype)
