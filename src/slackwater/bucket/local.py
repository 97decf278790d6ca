"""A directory as a bucket: on one machine, or on a file system that several share.

Each object is a file under its key. A write lands in a hidden file beside its target, is flushed to the disk,
and takes its name in one step: a crash at any point leaves the old object or the new one, and at most a
hidden file, which names its target.
"""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from slackwater.bucket.base import ObjectInfo, Unfinished
from slackwater.bucket.key import check_key, check_prefix, check_range
from slackwater.errors import (
    AuthError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    SlackwaterError,
    UnavailableError,
    UnsupportedError,
)

_TOKEN: Final = re.compile(r"[0-9a-f]{16}")
_HALF: Final = re.compile(rf"\.put-({_TOKEN.pattern})-(.+)")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


class LocalBucket:
    """A bucket in a directory. Safe for any number of threads and processes on one file system.

    Args:
        root: The directory.
        create: Make the directory where it doesn't exist.

    Raises:
        InvalidInputError: ``root`` is a file, or lies below one.
        AuthError: ``create`` and the directory may not be made; or what lies above it may not be looked at.
    """

    def __init__(self, root: Path | str, *, create: bool = False) -> None:
        self._root = Path(root).absolute()
        with self._mapped(""):
            file = next((path for path in (self._root, *self._root.parents) if path.is_file()), None)
        if file is not None:
            where = "" if file == self._root else f", so that {self._root} can't be a directory below it"
            raise InvalidInputError(f"{file} is a file, no bucket{where}", hint="name a directory")
        if create:
            with self._mapped(""):
                self._make_folder(self._root)

    @property
    def url(self) -> str:
        """The directory as a ``file://`` URL."""
        return self._root.as_uri()

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `slackwater.bucket.base.Get.get`."""
        with self._mapped(key), self._path(key).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise CorruptError(f"{self.url}/{key} has {size} bytes, at most {max_bytes} are expected")
            return self._exactly(file.read(size), size, key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `slackwater.bucket.base.Get.get_range`."""
        check_range(start, length)
        path = self._path(key)
        if length == 0:
            return b""
        with self._mapped(key), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < start + length:
                raise CorruptError(f"{self.url}/{key} has {size} bytes, too few for [{start}, {start + length})")
            file.seek(start)
            return self._exactly(file.read(length), length, key)

    def put(self, key: str, body: bytes | memoryview) -> None:
        """See `slackwater.bucket.base.Put.put`."""
        path = self._path(key)
        with self._mapped(key), self._written(path, body) as temp:
            temp.replace(path)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """See `slackwater.bucket.base.PutIfAbsent.put_if_absent`.

        Raises:
            UnsupportedError: The file system has no hard links, the one way to give a whole file a free name.
        """
        path = self._path(key)
        with self._mapped(key), self._written(path, body) as temp:
            return self._link(temp, path)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `slackwater.bucket.base.List.list`."""
        return self._whole(check_prefix(prefix))

    def delete(self, key: str) -> None:
        """See `slackwater.bucket.base.Delete.delete`."""
        self._remove(key, self._path(key))

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """See `slackwater.bucket.base.Abort.unfinished`."""
        return self._halves(check_prefix(prefix))

    def abort(self, upload: Unfinished) -> None:
        """See `slackwater.bucket.base.Abort.abort`.

        Raises:
            InvalidInputError: ``upload`` was made up.
        """
        path = self._path(upload.key)
        if not _TOKEN.fullmatch(upload.upload):
            raise InvalidInputError(f"{upload.upload[:80]!r} is no unfinished write of {self.url}/{upload.key}")
        self._remove(upload.key, _half(path, upload.upload))

    def _remove(self, key: str, path: Path) -> None:
        with self._mapped(key):
            self._require_root()
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                path.unlink()
                flush_folder(path.parent)

    def _whole(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._mapped(prefix):
            for path in self._files(prefix):
                if not path.name.startswith(".") and (info := self._info(path)):
                    yield info

    def _halves(self, prefix: str) -> Iterator[Unfinished]:
        with self._mapped(prefix):
            for path in self._files(prefix):
                found = _HALF.fullmatch(path.name)
                if found and (info := self._info(path)):
                    key = path.with_name(found[2]).relative_to(self._root).as_posix()
                    yield Unfinished(key=key, upload=found[1], started_s=info.modified_s)

    def _files(self, prefix: str) -> Iterator[Path]:
        """Hidden ones too."""
        self._require_root()
        for folder, folders, names in os.walk(self._root / prefix, onerror=_unless_gone):
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from (Path(folder, name) for name in names if _is_text(Path(folder, name)))

    def _info(self, path: Path) -> ObjectInfo | None:
        try:
            found = path.stat()
        except FileNotFoundError:  # deleted since
            return None
        key = path.relative_to(self._root).as_posix()
        return ObjectInfo(key=key, size=found.st_size, modified_s=found.st_mtime)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _link(self, temp: Path, path: Path) -> bool:
        try:
            os.link(temp, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise UnsupportedError(
                    f"{self.url} can't create a file only if it is absent: its file system has no hard links",
                    hint="use a local disk, NFS, or an object store for the bucket",
                ) from error
            raise
        return True

    @contextmanager
    def _written(self, path: Path, body: bytes | memoryview) -> Generator[Path]:
        """A hidden file beside ``path`` that holds ``body``; the folder is flushed after its use."""
        self._require_root()
        self._make_folder(path.parent)
        if path.is_dir():
            raise self._clash(path)
        temp = _half(path, secrets.token_hex(8))
        try:
            with temp.open("xb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            yield temp
        finally:
            temp.unlink(missing_ok=True)
        flush_folder(path.parent)

    def _exactly(self, body: bytes, size: int, key: str) -> bytes:
        if len(body) != size:
            raise CorruptError(f"{self.url}/{key} ended after {len(body)} of {size} bytes")
        return body

    def _require_root(self) -> None:
        if not self._root.is_dir():
            raise NotFoundError(f"no such bucket: {self.url}", hint="make the directory, or check the path")

    @contextmanager
    def _mapped(self, key: str) -> Generator[None]:
        """The one place where operating-system errors become ours."""
        try:
            yield
        except OSError as error:
            raise self._translated(error, key) from error

    def _translated(self, error: OSError, key: str) -> SlackwaterError:
        where = f"{self.url}/{key}"
        reason = error.strerror or type(error).__name__
        if error.errno in _FULL:
            return UnavailableError(f"{where}: {reason}", hint="free space on the bucket's disk; it is tried again")
        if error.errno in _REFUSED:
            return AuthError(f"{where}: {reason}", hint="give this user the right to the bucket's directory")
        if error.errno in _ABSENT:
            self._require_root()
            return NotFoundError(f"no such object: {where}")
        return UnavailableError(f"{where}: {reason}")

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and its parents so that they survive a power cut."""
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError as error:
            raise self._clash(folder) from error
        flush_folder(folder.parent)

    def _clash(self, path: Path) -> UnsupportedError:
        return UnsupportedError(
            f"{path.as_uri()} would be a file and a folder at once",
            hint="choose another key, or an object store",
        )


def _is_text(path: Path) -> bool:
    """Whether a name is UTF-8: others are no keys, and nobody could print them."""
    return str(path).isascii() or not any("\ud800" <= char <= "\udfff" for char in str(path))


def _half(path: Path, token: str) -> Path:
    """Where a file waits that is to become ``path``."""
    return path.with_name(f".put-{token}-{path.name}")


def _unless_gone(error: OSError) -> None:
    """A folder that can't be read must not look empty to who decides by a listing."""
    if error.errno not in _ABSENT:
        raise error


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
