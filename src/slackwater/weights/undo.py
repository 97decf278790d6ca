"""What tiles held before a body changed them, kept beside a folder until the body is done.

A process that is killed while it writes leaves tiles that are neither old nor new, and no digest knows them. Their
records bring them back. A record appears in one step: a kill leaves it whole or not at all. A power cut may lose it;
then the digests tell.
"""

import re
import stat
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import ConflictError, InvalidInputError, SlackwaterError
from slackwater.weights.source import UNDO_FOLDER, ShardSource

_COUNT: Final = struct.Struct("<Q")
_PART: Final = ".part"
_OURS: Final = re.compile(r"[0-9]{1,12}(\.part)?")

Pairs = Mapping[int, tuple[int, int]]
"""The digests before and after of each tile that a delta changes, by number."""


class UndoLog:
    """The records of one folder. Safe for threads that write different tiles.

    Args:
        folder: The folder that is written.
        outline: Of its tensors.
    """

    def __init__(self, folder: Path, outline: Outline) -> None:
        self._folder = folder / UNDO_FOLDER
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

    def put_back(self, source: ShardSource, pairs: Pairs) -> int:
        """Bring back tiles that are neither as before the delta nor as after it, and forget the records.

        Args:
            source: Writable.
            pairs: Of the delta that was being applied, and is to be applied again.

        Returns:
            How many records there were. Those that aren't whole are forgotten alone.

        Raises:
            ConflictError: A record is of another delta. Nothing was written.
            InvalidInputError: The folder of records is a link or no folder.
        """
        records = [(path, self._read(path)) for path in self._records()]
        for path, tiles in records:
            if any(pairs.get(number, (None,))[0] != digest for number, digest, _ in tiles):
                raise ConflictError(
                    f"the application of another delta was interrupted here: {path}",
                    hint=f"run that one again; or fetch the model again into a folder without {UNDO_FOLDER}",
                )
        for path, tiles in records:
            self._restore(source, tiles, pairs)
            path.unlink()
        self.close()
        return len(records)

    def _records(self) -> Iterator[Path]:
        """The records, and what became of unfinished ones; nothing else that lies there."""
        if self._folder.is_symlink() or (self._folder.exists() and not self._folder.is_dir()):
            raise InvalidInputError(f"{self._folder} is no folder of ours", hint="remove it, after a look at it")
        names = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        return (path for path in names if _OURS.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode))

    def close(self) -> None:
        """Remove the folder of records, where it is empty."""
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _restore(self, source: ShardSource, tiles: Sequence[tuple[int, int, Bits]], pairs: Pairs) -> None:
        for number, digest, bits in tiles:
            spec, tile = self._outline.place(number)
            held = tile_digest(tile.take(source.bits(spec.name)))
            if held not in pairs[number] and tile_digest(bits) == digest:
                tile.put(source.bits(spec.name), bits)

    def _read(self, path: Path) -> list[tuple[int, int, Bits]]:
        """The tiles of a record, with their digests; none of one that isn't whole. Its size is checked first."""
        if path.suffix == _PART:
            return []
        with path.open("rb") as file:
            count = int.from_bytes(file.read(_COUNT.size), "little")
            if not 1 <= count <= self._outline.num_tiles:
                return []
            words = np.frombuffer(file.read(2 * _COUNT.size * count), "<u8").tolist()
            numbers = words[:count]
            if len(words) != 2 * count or any(number >= self._outline.num_tiles for number in numbers):
                return []
            places = [self._outline.place(number) for number in numbers]
            sizes = [tile.count * spec.bits_dtype.itemsize for spec, tile in places]
            if path.stat().st_size != _COUNT.size * (1 + 2 * count) + sum(sizes):
                return []
            tiles = [
                np.frombuffer(file.read(size), spec.bits_dtype) for (spec, _), size in zip(places, sizes, strict=True)
            ]
        return list(zip(numbers, words[count:], tiles, strict=True))
