"""Digests of small files that hardly ever change."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from slackwater.checkpoint.digest import object_digest
from slackwater.ids import ObjectDigest


class FileDigests:
    """SHA-256 of files; one that has kept its size and its time isn't read again."""

    def __init__(self) -> None:
        self._known: Final[dict[tuple[Path, int, int], ObjectDigest]] = {}

    def of(self, files: Mapping[str, Path]) -> Mapping[str, ObjectDigest]:
        """The digests of some files, by the same names.

        Raises:
            OSError: One can't be read.
        """
        return {name: self._digest(path) for name, path in files.items()}

    def _digest(self, path: Path) -> ObjectDigest:
        stat = path.stat()
        key = path, stat.st_size, stat.st_mtime_ns
        if key not in self._known:
            self._known[key] = object_digest(path.read_bytes())
        return self._known[key]
