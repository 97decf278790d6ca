"""What tiles held before a body changed them, kept beside a folder until the body is done.

A process that is killed while it writes leaves tiles that are neither old nor new, and no digest knows them. Their
records bring them back. A record appears in one step: a kill leaves it whole or not at all. A power cut may lose it;
then the digests tell.
"""

import struct
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import NotFoundError
from slackwater.weights.source import ShardSource

FOLDER: Final = ".slackwater-undo"
"""Where the records lie, in the folder that is written."""

_COUNT: Final = struct.Struct("<Q")
_PART: Final = ".part"


class UndoLog:
    """The records of one folder. Safe for threads that write different tiles.

    Args:
        folder: The folder that is written.
        outline: Of its tensors.
    """

    def __init__(self, folder: Path, outline: Outline) -> None:
        self._folder = folder / FOLDER
        self._outline = outline

    @contextmanager
    def keeping(self, numbers: Sequence[int], held: Sequence[Bits]) -> Generator[None]:
        """Keep the bits of some tiles within the block; they are forgotten at its end, however it ends but by a kill.

        Args:
            numbers: The tiles, as the outline numbers them.
            held: Their bits, flat.
        """
        self._folder.mkdir(exist_ok=True)
        path = self._folder / str(numbers[0])
        part = path.with_suffix(_PART)
        with part.open("wb") as file:
            file.write(_COUNT.pack(len(numbers)))
            file.write(np.array([*numbers, *map(tile_digest, held)], dtype="<u8").data)
            for bits in held:
                file.write(np.ascontiguousarray(bits).data)
        part.replace(path)
        try:
            yield
        finally:
            path.unlink()

    def put_back(self, source: ShardSource) -> int:
        """Write the bits of every record into a writable source, and forget them; returns how many records there were.

        Records that aren't whole, or of another outline, are forgotten alone.
        """
        records = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        for path in records:
            if path.suffix != _PART:
                self._restore(source, path.read_bytes())
            path.unlink()
        self.close()
        return len(records)

    def close(self) -> None:
        """Remove the folder of records, which is empty after every end but a kill."""
        if self._folder.is_dir():
            self._folder.rmdir()

    def _restore(self, source: ShardSource, record: bytes) -> None:
        try:
            (count,) = _COUNT.unpack_from(record)
            words = np.frombuffer(record, "<u8", 2 * count, _COUNT.size)
            begin, saved = _COUNT.size + words.nbytes, list[tuple[int, Bits]]()
            for number, digest in zip(words[:count].tolist(), words[count:].tolist(), strict=True):
                spec, tile = self._outline.place(number)
                bits = np.frombuffer(record, spec.bits_dtype, tile.count, begin)
                begin += bits.nbytes
                if tile_digest(bits) == digest:
                    saved.append((number, bits))
        except (struct.error, ValueError, NotFoundError):
            return
        for number, bits in saved:
            spec, tile = self._outline.place(number)
            tile.put(source.bits(spec.name), bits)
