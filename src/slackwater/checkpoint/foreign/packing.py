"""Compressed bodies of foreign deltas: deflated, and inflated to a bound known beforehand."""

import zlib
from typing import Final, Literal

import zstandard

from slackwater.errors import CorruptError

Compression = Literal["zstd", "zlib"]

LEVEL: Final = 1
"""zstd's level for writing, as slime and CoreWeave write; readers take any."""

_WINDOW_BYTES: Final = 8 * 1024**2
"""Most memory for what a frame of unknown size refers back to: what RFC 8878 recommends that readers allow."""


def deflate(compression: Compression, data: memoryview) -> bytes:
    """One frame (zstd, its content's size in its header) or stream (zlib)."""
    if compression == "zlib":
        return zlib.compress(data)
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def inflate(compression: Compression, where: str, body: memoryview, most: int) -> bytes:
    """Inflate a whole body; memory beyond ``most`` bytes is never filled, whatever the body claims.

    Raises:
        CorruptError: It is broken, holds more than ``most`` bytes, or bytes follow its end.
    """
    return _zlib(where, body, most) if compression == "zlib" else _zstd(where, body, most)


def _zstd(where: str, body: memoryview, most: int) -> bytes:
    try:
        claimed = zstandard.get_frame_parameters(body).content_size
        if most < claimed != zstandard.CONTENTSIZE_UNKNOWN:
            raise CorruptError(f"{where}: the frame says that it holds {claimed} bytes, and {most} fit")
        # zstandard takes a bound of 0 for none at all.
        return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompress(
            body, max_output_size=max(most, 1), allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptError(f"{where}: the zstd frame is broken or holds more than {most} bytes: {error}") from error


def _zlib(where: str, body: memoryview, most: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(body, most + 1)
    except zlib.error as error:
        raise CorruptError(f"{where}: the zlib stream is broken: {error}") from error
    if not stream.eof or stream.unused_data:
        raise CorruptError(f"{where}: the zlib stream is cut, holds more than {most} bytes, or isn't all of the body")
    return data
