"""The bucket seam: one protocol per verb, so that a function asks for what it uses.

Keys are relative to the bucket's prefix: segments of letters, digits, ``._-``, joined by ``/``. Calls block, release
the GIL while they wait, and may be made from any thread; drivers on an event loop run them in threads. Transient
failures (429, 5xx, resets, 409 on a conditional create) are retried inside, with jittered back-off, up to the
bucket's deadline; what is raised is final.

Errors shared by every verb: AuthError (the store refused the credentials), UnavailableError (it didn't answer
within the deadline), NotFoundError for a bucket that does not exist.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """One object as a listing shows it."""

    key: str
    size: int
    """Bytes."""


class Get(Protocol):
    """Read objects."""

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object.

        Raises:
            NotFoundError: No such object.
            CorruptError: The object is larger than ``max_bytes``, or the answer was cut; at most ``max_bytes`` + one
                block were held.
        """
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly bytes ``[start, start + length)``. A length of 0 is answered without a call.

        Raises:
            NotFoundError: No such object.
            CorruptError: The object ends before the range does.
        """
        ...


class Put(Protocol):
    """Write whole objects. No reader ever sees a part of one."""

    def put(self, key: str, body: bytes | memoryview) -> None:
        """Create or replace, atomically. For content-named blobs and hints; a name that others read as a commit
        is made with `PutIfAbsent` alone.
        """
        ...


class PutIfAbsent(Protocol):
    """The commit: the one conditional verb that safety rests on."""

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Create the object unless it exists. True: this call made it. False: it exists, made by another or by an
        earlier attempt of this very call whose answer was lost: read it back and compare.
        """
        ...


class List(Protocol):
    """List objects. No safety rests on a listing; it may lag."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix`` (a whole segment), in no order."""
        ...


class Bucket(Get, Put, PutIfAbsent, List, Protocol):
    """All verbs. Deleting is not one of them: only garbage collection may, through a seam of its own."""

    @property
    def url(self) -> str:
        """What the user wrote, without secrets: for messages."""
        ...
