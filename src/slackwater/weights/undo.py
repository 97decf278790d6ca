"""What tiles held before a body changed them, kept beside a folder until the body is done.

A process that is killed while it writes leaves tiles that are neither old nor new, and no digest knows them. Their
records bring them back. A record appears in one step: a kill leaves it whole or not at all. A power cut may lose it;
then the digests tell.
"""

import struct
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np

from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import SlackwaterError
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
        """Keep the bits of some tiles within the block. They are forgotten at its end, unless it failed unforeseen.

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
        except SlackwaterError:  # what raises it leaves tiles as they were
            path.unlink()
            raise
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
        """Remove the folder of records, where it is empty."""
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _restore(self, source: ShardSource, record: bytes) -> None:
        for number, digest, bits in self._read(record):
            if tile_digest(bits) == digest:
                spec, tile = self._outline.place(number)
                tile.put(source.bits(spec.name), bits)

    def _read(self, record: bytes) -> list[tuple[int, int, Bits]]:
        """The tiles of a record, with their digests; none of one that isn't whole."""
        count = int.from_bytes(record[: _COUNT.size], "little")
        begin = _COUNT.size * (1 + 2 * count)
        if count == 0 or len(record) < begin:
            return []
        words = np.frombuffer(record, "<u8", 2 * count, _COUNT.size).tolist()
        if any(number >= self._outline.num_tiles for number in words[:count]):
            return []
        places = [self._outline.place(number) for number in words[:count]]
        ends = list(accumulate((t.count * s.bits_dtype.itemsize for s, t in places), initial=begin))
        if len(record) != ends[-1]:
            return []
        tiles = [np.frombuffer(record, s.bits_dtype, t.count, end) for (s, t), end in zip(places, ends, strict=False)]
        return list(zip(words[:count], words[count:], tiles, strict=True))
