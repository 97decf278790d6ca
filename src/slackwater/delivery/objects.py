"""Objects as a manifest names them: fetched in pieces, resumed after a crash, verified before use."""

import errno
import hashlib
import logging
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from slackwater.bucket.base import Get
from slackwater.checkpoint.manifest import ObjectRef
from slackwater.errors import AuthError, CorruptError, InvalidInputError, NotFoundError, UnavailableError

T = TypeVar("T")

PIECE_BYTES: Final = 16 * 1024 * 1024
"""What one call fetches at most: the unit of a retry and of resuming."""

_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MISPLACED: Final = frozenset({errno.ENOTDIR, errno.EISDIR, errno.EEXIST})
_log = logging.getLogger(__name__)


def verify(ref: ObjectRef, body: bytes) -> None:
    """Compare an object's size, then its digest, with what the manifest says.

    Raises:
        CorruptError: They differ; the message names the object.
    """
    if len(body) != ref.size:
        raise CorruptError(f"{ref.key} has {len(body)} bytes, and the manifest says {ref.size}")
    _compare(ref, hashlib.sha256(body).hexdigest())


def read_object(source: Get, ref: ObjectRef) -> bytes:
    """Fetch an object into memory, in pieces. Its digest is the caller's to `verify`.

    Raises:
        NotFoundError: The bucket has no such object.
        CorruptError: It has another size than the manifest says.
        UnavailableError: The bucket doesn't answer.
    """
    if ref.size <= PIECE_BYTES:
        return _get(source, ref)
    return b"".join(_get_range(source, ref, start) for start in range(0, ref.size, PIECE_BYTES))


def save_object(source: Get, ref: ObjectRef, path: Path) -> None:
    """Fetch an object into a file. The file appears whole and verified, or not at all.

    Pieces that an earlier call brought are kept in a hidden file beside ``path`` and read again from there.

    Raises:
        NotFoundError: The bucket has no such object.
        CorruptError: Its size or digest is wrong; nothing of it is kept.
        UnavailableError: The bucket doesn't answer, or the disk is full.
    """
    part = path.with_name(f".{path.name}.part")
    with disk_errors(path):
        if path.exists():
            if is_intact(path, ref):
                return
            path.unlink()
        with part.open("a+b") as file:
            found = _fill(source, ref, file)
        if found != ref.sha256:
            part.unlink()
        _compare(ref, found)
        part.replace(path)


def is_intact(path: Path, ref: ObjectRef) -> bool:
    """Whether a file is there with an object's size and digest."""
    return path.is_file() and path.stat().st_size == ref.size and _hash_file(path) == ref.sha256


def twice(fetch: Callable[[], T]) -> T:
    """Fetch; where that brought wrong bytes, once more: they may have been spoilt on the way.

    Raises:
        CorruptError: Both answers were wrong.
    """
    try:
        return fetch()
    except CorruptError as error:
        _log.warning("%s; fetching once more", error)
        return fetch()


@contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """The one place where errors of the local disk become ours."""
    try:
        yield
    except OSError as error:
        message = f"{path}: {error.strerror or type(error).__name__}"
        if error.errno in _REFUSED:
            raise AuthError(message, hint="give this user the right to the cache directory") from error
        if error.errno in _MISPLACED:
            raise InvalidInputError(message, hint="name a directory for the cache, not a file") from error
        raise UnavailableError(message, hint="free space on the cache's disk; it is tried again") from error


def _fill(source: Get, ref: ObjectRef, file: BinaryIO) -> str:
    """Append what is missing; return the digest of the whole."""
    kept = min(os.fstat(file.fileno()).st_size, ref.size) // PIECE_BYTES * PIECE_BYTES
    file.truncate(kept)
    file.seek(0)
    digest = hashlib.sha256()
    while known := file.read(PIECE_BYTES):
        digest.update(known)
    for start in range(kept, ref.size, PIECE_BYTES):
        piece = _get(source, ref) if ref.size <= PIECE_BYTES else _get_range(source, ref, start)
        file.write(piece)
        digest.update(piece)
    file.flush()
    os.fsync(file.fileno())
    return digest.hexdigest()


def _get(source: Get, ref: ObjectRef) -> bytes:
    try:
        body = source.get(ref.key, max_bytes=ref.size)
    except NotFoundError as error:
        raise _missing(error) from error
    if len(body) != ref.size:
        raise CorruptError(f"{ref.key} has {len(body)} bytes, and the manifest says {ref.size}")
    return body


def _get_range(source: Get, ref: ObjectRef, start: int) -> bytes:
    length = min(PIECE_BYTES, ref.size - start)
    try:
        body = source.get_range(ref.key, start, length)
    except NotFoundError as error:
        raise _missing(error) from error
    if len(body) != length:
        raise CorruptError(f"{ref.key} gave {len(body)} of {length} bytes from {start}")
    return body


def _missing(error: NotFoundError) -> NotFoundError:
    return NotFoundError(
        f"the manifest names an object that isn't there: {error.message}",
        hint="an anchor above it may still be whole; check what deletes objects in the bucket",
    )


def _compare(ref: ObjectRef, found: str) -> None:
    if found != ref.sha256:
        raise CorruptError(f"{ref.key} has SHA-256 {found}, and the manifest says {ref.sha256}")


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
