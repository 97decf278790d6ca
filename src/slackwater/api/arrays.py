"""Arrays on the wire: ``{dtype, shape, data}``, data in base64 of little-endian bytes; exact where JSON isn't."""

import base64
import math
import struct
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from slackwater.errors import CorruptError

Dtype = Literal["int32", "int64", "float32"]
_CODES: Final = MappingProxyType({"int32": "i", "int64": "q", "float32": "f"})


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
        try:
            raw = base64.b64decode(self.data, validate=True)
        except ValueError as error:
            raise CorruptError(f"an array's data is no base64: {error}") from error
        code = _CODES[self.dtype]
        count = math.prod(self.shape)
        if min(self.shape, default=0) < 0 or len(raw) != count * struct.calcsize(f"<{code}"):
            raise CorruptError(f"an array of shape {self.shape} came with {len(raw)} bytes")
        return struct.unpack(f"<{count}{code}", raw)


def array(dtype: Dtype, values: Sequence[float], shape: tuple[int, ...] | None = None) -> Array:
    """Encode values; ``shape`` defaults to one axis."""
    raw = struct.pack(f"<{len(values)}{_CODES[dtype]}", *values)
    return packed(dtype, raw, shape or (len(values),))


def packed(dtype: Dtype, raw: bytes, shape: tuple[int, ...]) -> Array:
    """Encode bytes that are little-endian values already."""
    return Array(dtype=dtype, shape=shape, data=base64.b64encode(raw).decode())
