"""Arrays on the wire: ``{dtype, shape, data}``, data in base64 of little-endian bytes; exact where JSON isn't."""

import base64
import math
import struct
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from slackwater.errors import CorruptError

Dtype = Literal["uint8", "uint16", "int32", "int64", "float32"]
_CODES: Final = MappingProxyType({"uint8": "B", "uint16": "H", "int32": "i", "int64": "q", "float32": "f"})
PIECE_BYTES: Final = 768 * 1024
"""Encoded in one go; a multiple of 3, so that pieces join."""


class Array(msgspec.Struct, frozen=True, kw_only=True):
    """One array, row-major. Floats may be minus infinity."""

    dtype: Dtype
    shape: tuple[int, ...]
    data: str

    def values(self) -> tuple[float, ...]:
        """The flat values; integers are ints.

        Raises:
            CorruptError: Data and shape don't fit, or the data is no base64.
        """
        raw, code = self.raw(), _CODES[self.dtype]
        return struct.unpack(f"<{len(raw) // struct.calcsize(f'<{code}')}{code}", raw)

    def raw(self) -> bytes:
        """The values as little-endian bytes; raises as `values` does."""
        try:
            raw = base64.b64decode(self.data, validate=True)
        except ValueError as error:
            raise CorruptError(
                f"an array's data is no base64: {error}", hint="encode little-endian bytes in standard base64, padded"
            ) from error
        size = math.prod(self.shape) * struct.calcsize(f"<{_CODES[self.dtype]}")
        if min(self.shape, default=0) < 0 or len(raw) != size:
            raise CorruptError(
                f"an array of shape {self.shape} came with {len(raw)} bytes", hint=f"send {size} bytes of {self.dtype}"
            )
        return raw


def array(dtype: Dtype, values: Sequence[float], shape: tuple[int, ...] | None = None) -> Array:
    """Encode values; ``shape`` defaults to one axis."""
    raw = struct.pack(f"<{len(values)}{_CODES[dtype]}", *values)
    return packed(dtype, raw, shape or (len(values),))


def packed(dtype: Dtype, raw: bytes, shape: tuple[int, ...]) -> Array:
    """Encode bytes that are little-endian values already."""
    return Array(dtype=dtype, shape=shape, data=base64.b64encode(raw).decode())


def joined(parts: Iterable[bytes]) -> str:
    """Base64 of all parts together. Made piece by piece: a thread that makes a long one leaves others their turns."""
    return "".join(b2a_base64(piece, newline=False).decode("ascii") for piece in _pieces(parts))


def _pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for part in parts:
        for at in range(0, len(part), PIECE_BYTES):
            held += part[at : at + PIECE_BYTES]
            if len(held) >= PIECE_BYTES:
                yield bytes(held[:PIECE_BYTES])
                del held[:PIECE_BYTES]
    yield bytes(held)
