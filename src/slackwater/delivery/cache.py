"""Packs on the local disk, named by their digest, so that a restart fetches nothing twice."""

import logging
import os
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from slackwater.checkpoint.manifest import ObjectRef
from slackwater.delivery.objects import disk_errors, verify
from slackwater.errors import CorruptError, UnavailableError
from slackwater.ids import ObjectDigest

_log = logging.getLogger(__name__)


class BlobCache:
    """A bounded cache of verified objects. One process owns the directory; any number of its threads.

    Files are named by their SHA-256 and appear whole. They are verified again whenever they are read, so a
    power cut or a bad disk costs a fetch and nothing else.

    Args:
        root: The directory; made where it is missing.
        max_bytes: Most bytes of all files; the least recently read go first. Pinned files may exceed it, and
            so do files while they are written.

    Raises:
        AuthError: The directory may not be written.
    """

    def __init__(self, root: Path, *, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pins: Counter[ObjectDigest] = Counter()
        with disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            self._sizes = _take_over(root)
        self._evict(max_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files held."""
        with self._lock:
            return sum(self._sizes.values())

    def read(self, ref: ObjectRef) -> bytes | None:
        """The verified bytes; None where they aren't held, or are spoilt: then they are dropped."""
        path = self._root / ref.sha256
        with disk_errors(path):
            try:
                with path.open("rb") as file:
                    body = file.read(ref.size + 1)
                verify(ref, body)
                os.utime(path)
            except FileNotFoundError:
                return None
            except CorruptError as error:
                _log.warning("the cache's copy is spoilt and dropped: %s", error)
                self._drop(ref.sha256)
                return None
        self._touch(ref.sha256)
        return body

    def store(self, ref: ObjectRef, body: bytes) -> None:
        """Verify an object and keep it. One that is larger than the whole cache is verified only.

        Raises:
            CorruptError: The bytes are not what the manifest says; nothing is kept.
            UnavailableError: The disk is full, even after all unpinned files have gone.
        """
        verify(ref, body)
        if ref.size > self._max_bytes:
            return
        try:
            self._write(ref, body)
        except UnavailableError:
            self._evict(0)
            self._write(ref, body)

    @contextmanager
    def pinned(self, digests: Iterable[ObjectDigest]) -> Generator[None]:
        """Evict none of these inside the block."""
        held = Counter(digests)
        with self._lock:
            self._pins.update(held)
        try:
            yield
        finally:
            with self._lock:
                self._pins -= held

    def _write(self, ref: ObjectRef, body: bytes) -> None:
        temp = self._root / f".put-{secrets.token_hex(8)}"
        with disk_errors(self._root / ref.sha256):
            try:
                temp.write_bytes(body)
                self._admit(ref, temp)
            finally:
                temp.unlink(missing_ok=True)
        self._evict(self._max_bytes)

    def _admit(self, ref: ObjectRef, temp: Path) -> None:
        """Name the file and index it in one step, as every removal does: the index and the disk agree."""
        with self._lock:
            temp.replace(self._root / ref.sha256)
            self._sizes[ref.sha256] = ref.size
            self._sizes.move_to_end(ref.sha256)

    def _touch(self, digest: ObjectDigest) -> None:
        with self._lock:
            if digest in self._sizes:
                self._sizes.move_to_end(digest)

    def _drop(self, digest: ObjectDigest) -> None:
        with self._lock:
            (self._root / digest).unlink(missing_ok=True)
            self._sizes.pop(digest, None)

    def _evict(self, room: int) -> None:
        """Drop the least recently read unpinned files until the rest fit into ``room`` bytes."""
        with self._lock, disk_errors(self._root):
            excess = sum(self._sizes.values()) - room
            for digest in [digest for digest in self._sizes if not self._pins[digest]]:
                if excess <= 0:
                    break
                (self._root / digest).unlink(missing_ok=True)
                excess -= self._sizes.pop(digest)


def _take_over(root: Path) -> OrderedDict[ObjectDigest, int]:
    """Index what an earlier process left, oldest first; drop what it was writing when it was killed."""
    found: list[tuple[int, str, int]] = []
    for entry in root.iterdir():
        if entry.name.startswith("."):
            entry.unlink()
        else:
            stat = entry.stat()
            found.append((stat.st_mtime_ns, entry.name, stat.st_size))
    return OrderedDict((ObjectDigest(name), size) for _, name, size in sorted(found))
