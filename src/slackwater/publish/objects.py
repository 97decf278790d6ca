"""Objects that a manifest names, read from a bucket and checked: whole, or in pieces where they are large."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from slackwater.bucket.base import Get
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.manifest import ObjectRef
from slackwater.errors import CorruptError

_MEND: Final = "bring it back from a copy, or publish an anchor: that needs nothing of what is damaged"
PIECE_BYTES: Final = 16 * 1024 * 1024
"""What one call fetches of a large object."""


def fetch_object(bucket: Get, ref: ObjectRef) -> bytes:
    """A whole object in memory.

    Raises:
        NotFoundError: It isn't there.
        CorruptError: Its size or SHA-256 isn't what the manifest says.
    """
    body = _get(bucket, ref)
    _compare(ref, object_digest(body))
    return body


def check_object(bucket: Get, ref: ObjectRef, into: Path | None = None) -> Iterator[int]:
    """Read an object in pieces; yields the size of each. At the end it has been checked.

    Args:
        bucket: Where it lies.
        ref: What the manifest says of it.
        into: A file that its bytes are written to; None looks only.

    Raises:
        NotFoundError: It isn't there.
        CorruptError: Its size or SHA-256 isn't what the manifest says.
    """
    digest = hashlib.sha256()
    for piece in _pieces(bucket, ref):
        digest.update(piece)
        if into is not None:
            with into.open("ab") as file:
                file.write(piece)
        yield len(piece)
    _compare(ref, digest.hexdigest())


def _pieces(bucket: Get, ref: ObjectRef) -> Iterator[bytes]:
    if ref.size <= PIECE_BYTES:
        yield _get(bucket, ref)
        return
    for start in range(0, ref.size, PIECE_BYTES):
        yield bucket.get_range(ref.key, start, min(PIECE_BYTES, ref.size - start))
    if _goes_on(bucket, ref):
        raise CorruptError(f"{ref.key} is longer than the {ref.size} bytes that its manifest says")


def _get(bucket: Get, ref: ObjectRef) -> bytes:
    body = bucket.get(ref.key, max_bytes=ref.size)
    if len(body) != ref.size:
        raise CorruptError(f"{ref.key} has {len(body)} bytes, and its manifest says {ref.size}", hint=_MEND)
    return body


def _goes_on(bucket: Get, ref: ObjectRef) -> bool:
    try:
        bucket.get_range(ref.key, ref.size, 1)
    except CorruptError:  # it ends where it should
        return False
    return True


def _compare(ref: ObjectRef, found: str) -> None:
    if found != ref.sha256:
        raise CorruptError(f"{ref.key} hasn't the SHA-256 that its manifest says", hint=_MEND)
