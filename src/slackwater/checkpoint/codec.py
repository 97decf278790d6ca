"""One tile of a delta, to bytes and back. Normative page: docs/format.md.

A changed element is told by its *gap* from the changed element before it and by its *step*: the distance
between old and new bits once these are put in the order of the numbers they stand for. Training moves most
weights to a neighbour, so steps are tiny; the map is a bijection on all bit patterns, NaN payloads included.

Nothing decoded is given out before it has been checked against the digest that the manifest names.
"""

import struct
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import zstandard

from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.manifest import TensorEntry, TileEntry
from slackwater.checkpoint.planes import (
    join_planes,
    narrowest,
    split_planes,
    steps_between,
    steps_onto,
)
from slackwater.checkpoint.tensor import Bits, Tile, TileWrite
from slackwater.errors import CorruptError, InvalidInputError, WrongBaseError

LEVEL: Final = 1
"""zstd's level for writing; readers take any."""

DENSE_SHARE: Final = 8
"""Above one changed element in this many, a dense write is cheaper than a scattered one."""

_FULL_TRIED_ABOVE: Final = 4
"""A sparse body under a quarter of the tile's bytes is taken without trying ``full``."""

_SPARSE: Final = struct.Struct("<IBBH")
"""Count, bytes of a gap, bytes of a step, zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedTile:
    """A tile's body and what it says."""

    encoding: Literal["sparse", "full"]
    body: bytes
    changed: int
    """Elements whose bits differ; at least 1."""


def encode_tile(old: Bits, new: Bits) -> EncodedTile | None:
    """Encode what changed between two states of one tile; None where no bit did.

    Args:
        old: The parent's bits.
        new: The new bits; as many and as wide.

    Raises:
        InvalidInputError: The two differ in dtype or size.
    """
    if old.dtype != new.dtype or old.shape != new.shape:
        raise InvalidInputError(f"a tile of {old.dtype} {old.shape} can't become {new.dtype} {new.shape}")
    positions = np.flatnonzero(old != new)
    if positions.size == 0:
        return None
    body = _sparse_body(positions, old[positions], new[positions])
    if len(body) * _FULL_TRIED_ABOVE > new.nbytes:
        full = _pack(b"", split_planes(new))
        if len(full) < len(body):
            return EncodedTile(encoding="full", body=full, changed=positions.size)
    return EncodedTile(encoding="sparse", body=body, changed=positions.size)


def _sparse_body(positions: npt.NDArray[np.int64], old: Bits, new: Bits) -> bytes:
    gaps = narrowest(np.diff(positions, prepend=-1) - 1)
    steps = steps_between(old, new)
    head = _SPARSE.pack(positions.size, gaps.itemsize, steps.itemsize, 0)
    return _pack(head, [*split_planes(gaps), *split_planes(steps)])


def _pack(head: bytes, planes: list[bytes]) -> bytes:
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    frames = [compressor.compress(plane) for plane in planes]
    return b"".join((head, struct.pack(f"<{len(frames)}I", *map(len, frames)), *frames))


def decode_tile(entry: TensorEntry, tile: Tile, tile_entry: TileEntry, body: memoryview, old: Bits) -> TileWrite | None:
    """Decode one listed tile against the bits now held, and prove the result before giving it out.

    Args:
        entry: The tensor as the manifest lists it.
        tile: The tile of ``entry.spec`` at ``tile_entry.index``.
        tile_entry: What the manifest says of the body.
        body: The body's bytes, already checked as part of their object.
        old: ``tile.count`` elements as held now; only read.

    Returns:
        The write, or None where the tile already has its new bits: applying a delta twice is harmless.

    Raises:
        WrongBaseError: The bits held are neither the delta's old ones nor its new ones.
        CorruptError: The body breaks the format, or doesn't make what the manifest says.
        InvalidInputError: ``old`` isn't this tile.
    """
    where = f"{entry.name} tile {tile.index}"
    if old.dtype != entry.spec.bits_dtype or old.shape != (tile.count,):
        raise InvalidInputError(f"{where} has {tile.count} elements of {entry.dtype}, not {old.dtype} {old.shape}")
    if len(body) != tile_entry.length:
        _corrupt(where, "length", f"the body has {len(body)} bytes, the manifest says {tile_entry.length}")
    held = tile_digest(old)
    if held == tile_entry.post:
        return None
    if tile_entry.encoding != "raw" and held != tile_entry.pre:
        raise WrongBaseError(f"{where} isn't what the delta was made on", hint="catch up from an anchor")
    if tile_entry.encoding == "sparse":
        return _sparse_write(entry, tile, tile_entry, body, old)
    values = decode_dense(entry, tile, tile_entry, body)
    if tile_entry.encoding == "full":
        _check_changed(where, tile_entry, int(np.count_nonzero(old != values)))
    return TileWrite(name=entry.name, tile=tile, positions=None, values=values)


def decode_dense(entry: TensorEntry, tile: Tile, tile_entry: TileEntry, body: memoryview) -> Bits:
    """The bits of a ``raw`` or ``full`` body, proved; raw ones are a view of ``body``, without a copy.

    Raises:
        CorruptError: The body breaks the format, or doesn't make what the manifest says.
    """
    where, dtype = f"{entry.name} tile {tile.index}", entry.spec.bits_dtype
    if tile_entry.encoding == "raw":
        if len(body) != tile.count * dtype.itemsize:
            _corrupt(where, "length", f"{tile.count} elements of {entry.dtype} don't fill {len(body)} bytes")
        values: Bits = np.frombuffer(body, dtype=dtype)
    else:
        values = join_planes(_unpack(where, body, 0, [tile.count] * dtype.itemsize), dtype)
    _check_post(where, tile_entry, values)
    return values


def _sparse_write(entry: TensorEntry, tile: Tile, tile_entry: TileEntry, body: memoryview, old: Bits) -> TileWrite:
    where = f"{entry.name} tile {tile.index}"
    positions, steps = _read_sparse(where, tile, body, old.dtype)
    _check_changed(where, tile_entry, positions.size)
    values = steps_onto(old[positions], steps)
    result = old.copy()
    result[positions] = values
    _check_post(where, tile_entry, result)
    if positions.size * DENSE_SHARE > tile.count:
        return TileWrite(name=entry.name, tile=tile, positions=None, values=result)
    return TileWrite(name=entry.name, tile=tile, positions=positions.astype(np.uint32), values=values)


def _read_sparse(
    where: str, tile: Tile, body: memoryview, dtype: np.dtype[np.unsignedinteger]
) -> tuple[npt.NDArray[np.uint64], Bits]:
    if len(body) < _SPARSE.size:
        _corrupt(where, "header", f"it needs {_SPARSE.size} bytes and the body has {len(body)}")
    count, gap_width, step_width, zero = _SPARSE.unpack_from(body)
    if not 1 <= count <= tile.count:
        _corrupt(where, "count", f"{count} changed elements in a tile of {tile.count}")
    if gap_width not in (1, 2, 4):
        _corrupt(where, "gap width", f"{gap_width} is none of 1, 2 and 4")
    if step_width != dtype.itemsize:
        _corrupt(where, "step width", f"{step_width}, and an element has {dtype.itemsize} bytes")
    if zero != 0:
        _corrupt(where, "reserved", f"{zero} instead of 0")
    planes = _unpack(where, body, _SPARSE.size, [count] * (gap_width + step_width))
    gaps = join_planes(planes[:gap_width], np.dtype(f"<u{gap_width}"))
    # 64 bits hold the sum of any 2**32 gaps of 32 bits, so no sum wraps round to a small position.
    positions = np.cumsum(gaps, dtype=np.uint64) + np.arange(count, dtype=np.uint64)
    if int(positions[-1]) >= tile.count:
        _corrupt(where, "gaps", f"they reach element {positions[-1]} in a tile of {tile.count}")
    return positions, join_planes(planes[gap_width:], dtype)


def _unpack(where: str, body: memoryview, offset: int, sizes: list[int]) -> list[bytes]:
    """Inflate the frames after a table of their lengths; they fill the body to its last byte."""
    end = offset + 4 * len(sizes)
    if len(body) < end:
        _corrupt(where, "lengths", f"the table ends at byte {end} and the body has {len(body)}")
    planes: list[bytes] = []
    for index, (length, size) in enumerate(
        zip(struct.unpack_from(f"<{len(sizes)}I", body, offset), sizes, strict=True)
    ):
        start, end = end, end + length
        if end > len(body):
            _corrupt(where, f"plane {index}", f"it ends at byte {end} and the body has {len(body)}")
        planes.append(_inflate(f"{where}: plane {index}", body[start:end], size))
    if end != len(body):
        _corrupt(where, "end", f"{len(body) - end} bytes follow the last plane")
    return planes


def _inflate(where: str, frame: memoryview, size: int) -> bytes:
    """Inflate one frame to exactly ``size`` bytes. Its header comes first: zstd allocates by it."""
    try:
        claimed = zstandard.get_frame_parameters(frame).content_size
        if claimed != size:
            _corrupt(where, "content size", f"the frame says {claimed} bytes instead of {size}")
        plane = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(f"{where}: the zstd frame is broken: {error}") from error
    if len(plane) != size:
        _corrupt(where, "content", f"the frame holds {len(plane)} bytes instead of {size}")
    return plane


def _check_changed(where: str, tile_entry: TileEntry, found: int) -> None:
    if found != tile_entry.changed:
        _corrupt(where, "changed", f"{found} elements change, the manifest says {tile_entry.changed}")


def _check_post(where: str, tile_entry: TileEntry, values: Bits) -> None:
    if tile_digest(values) != tile_entry.post:
        _corrupt(where, "post", "the decoded tile hasn't the digest that the manifest names")


def _corrupt(where: str, field: str, why: str) -> NoReturn:
    raise CorruptError(f"{where}: {field}: {why}", hint="fetch the object again")
