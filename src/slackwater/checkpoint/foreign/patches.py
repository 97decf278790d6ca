"""What foreign deltas say of one tensor, to bits and back: XOR, overwritten bytes, overwritten elements.

Sources of the encodings: slime's delta documentation (``xor``, ``overwrite``), Fireworks' published package
(XOR alone), TRL's delta patches (indices and values).
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.foreign.checksum import Proof
from slackwater.checkpoint.foreign.delta import Change
from slackwater.checkpoint.foreign.packing import Compression, deflate, inflate
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import CorruptError, UnsupportedError

Encoding = Literal["xor", "overwrite"]

ENCODINGS: Final[Mapping[str, Encoding]] = {"xor": "xor", "overwrite": "overwrite"}
"""By the name that slime's ``delta_encoding`` has for them."""

_COUNT: Final = struct.Struct("<I")
_POSITION_BYTES: Final = 4
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class BytePatch:
    """A compressed body over a tensor's bytes, with a proof of the result."""

    encoding: Encoding
    compression: Compression
    body: memoryview
    proof: Proof

    def apply(self, spec: TensorSpec, old: Bits) -> Bits:
        """See `Patch.apply`."""
        held = _bytes_of(old)
        made = self._xor(spec, held) if self.encoding == "xor" else self._overwrite(spec, held)
        return self.proof.settle(spec.name, old, made.view(spec.bits_dtype))

    def _xor(self, spec: TensorSpec, held: _Bytes) -> _Bytes:
        mask = np.frombuffer(inflate(self.compression, spec.name, self.body, held.size), dtype=np.uint8)
        if mask.size != held.size:
            _corrupt(spec.name, f"the body holds {mask.size} bytes, and the tensor has {held.size}")
        return held ^ mask

    def _overwrite(self, spec: TensorSpec, held: _Bytes) -> _Bytes:
        most = _COUNT.size + (_POSITION_BYTES + 1) * held.size
        body = inflate(self.compression, spec.name, self.body, most)
        if len(body) < _COUNT.size:
            _corrupt(spec.name, f"the body holds {len(body)} bytes, and its count needs {_COUNT.size}")
        (count,) = _COUNT.unpack_from(body)
        values_at = _COUNT.size + _POSITION_BYTES * count
        if len(body) != values_at + count:
            _corrupt(spec.name, f"{count} changed bytes don't fill a body of {len(body)}")
        positions = np.frombuffer(body, dtype="<u4", count=count, offset=_COUNT.size)
        _check_positions(spec.name, positions, held.size)
        made = held.copy()
        made[positions] = np.frombuffer(body, dtype=np.uint8, count=count, offset=values_at)
        return made


def encode_bytes(change: Change, encoding: Encoding, compression: Compression) -> bytes:
    """A `BytePatch`'s body.

    Raises:
        UnsupportedError: The tensor is too large for ``overwrite``, whose positions have 32 bits.
    """
    old, new = _bytes_of(change.old), _bytes_of(change.new)
    if encoding == "xor":
        return deflate(compression, (old ^ new).data)
    if new.size > 2**32:
        raise UnsupportedError(f"{change.spec.name} has {new.size} bytes, too many for 'overwrite'", hint="write 'xor'")
    positions = np.flatnonzero(old != new)
    body = b"".join((_COUNT.pack(positions.size), positions.astype("<u4").tobytes(), new[positions].tobytes()))
    return deflate(compression, memoryview(body))


@dataclass(frozen=True, kw_only=True, slots=True)
class SparsePatch:
    """New elements at flat positions. Nothing proves the result: the layout has no checksum."""

    indices: npt.NDArray[np.integer[Any]]
    """Positions, rising; or the unchanged elements before each one."""
    gaps: bool
    """Whether ``indices`` are gaps."""
    dtype: str
    """safetensors' name of the values' dtype."""
    values: Bits
    """As many as ``indices``."""

    def apply(self, spec: TensorSpec, old: Bits) -> Bits:
        """See `Patch.apply`."""
        if self.dtype != spec.dtype:
            _corrupt(spec.name, f"the delta has values of {self.dtype}, and the tensor held is {spec.dtype}")
        positions = self._positions()
        _check_positions(spec.name, positions, old.size)
        made = old.copy()
        made[positions] = self.values
        return made

    def _positions(self) -> npt.NDArray[np.integer[Any]]:
        if not self.gaps:
            return self.indices
        # 64 bits hold the sum of any gaps of 32 bits that fit in memory, so no sum wraps round to a small position.
        return np.cumsum(self.indices, dtype=np.uint64) + np.arange(self.indices.size, dtype=np.uint64)


def _check_positions(where: str, positions: npt.NDArray[np.integer[Any]], size: int) -> None:
    """Positions rise, so that none comes twice, and lie inside."""
    if positions.size == 0:
        return
    if not (positions[1:] > positions[:-1]).all():
        _corrupt(where, "the positions don't rise from each to the next")
    first, last = int(positions[0]), int(positions[-1])
    if first < 0 or last >= size:
        _corrupt(where, f"the positions reach from {first} to {last}, and it ends at {size}")


def _bytes_of(bits: Bits) -> _Bytes:
    return np.ascontiguousarray(bits).view(np.uint8)


def _corrupt(where: str, why: str) -> NoReturn:
    raise CorruptError(f"{where}: {why}", hint="fetch the delta again")
