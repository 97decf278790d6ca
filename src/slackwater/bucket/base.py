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
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """One object as a listing shows it."""

    key: str
    size: int
    """Bytes."""
    modified_s: float | None = None
    """When it was written, in seconds since the epoch by the store's clock, to a second; None where it isn't told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tag:
    """What tells one write of an object from every other; a store uses one of both, or both. Opaque."""

    e_tag: str | None = None
    version: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """A write that was begun and neither ended nor called off: no reader sees it, and it takes room."""

    key: str
    """What it would have become."""
    upload: str
    """What tells it from other writes of the key. Opaque."""
    started_s: float | None = None
    """When it began, or was last written to where that is known: seconds since the epoch by the clock of
    ``ObjectInfo.modified_s``, to a second; None where it isn't told.
    """


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
    """What publishers and readers need. Deleting is no part of it: only garbage collection may, through `Delete`."""

    @property
    def url(self) -> str:
        """What the user wrote, without secrets: for messages."""
        ...


@runtime_checkable
class Delete(Protocol):
    """Delete objects: for garbage collection and the self-test alone. The key's rights may well exclude it."""

    def delete(self, key: str) -> None:
        """Delete the object; one that is absent is no error. What the store keeps of old versions stays.

        Raises:
            AuthError: The credentials may not delete.
        """
        ...


@runtime_checkable
class Abort(Protocol):
    """Find and abort what broken writes left: for garbage collection alone. The key's rights may well exclude it.

    Nothing tells what a dead writer left from what a live one is at: only the age does, and that is the caller's to
    judge. A live writer whose upload is aborted is told so by the store, and makes it anew.
    """

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Unfinished writes of keys that start with ``prefix`` (a whole segment), in no order.

        Raises:
            UnsupportedError: They can't be listed here; the hint says what else removes them.
            AuthError: The credentials may not list them.
        """
        ...

    def abort(self, upload: Unfinished) -> None:
        """Abort it and free its room. One that has ended since is no error: the object that it became stays.

        A part that arrives in this very moment may be left; then it is listed again.

        Raises:
            UnsupportedError: They can't be aborted here.
            AuthError: The credentials may not abort.
        """
        ...


@runtime_checkable
class Swap(Protocol):
    """Compare and swap, where a store has it. Nothing rests on it: the commit is `PutIfAbsent` everywhere."""

    def tag(self, key: str) -> Tag:
        """What identifies the object as it is now.

        Raises:
            NotFoundError: No such object.
        """
        ...

    def swap(self, key: str, body: bytes, expected: Tag) -> bool:
        """Replace the object if it is still the one that ``expected`` was read from.

        True: this call replaced it. False: it is another one by now or is gone; or an earlier attempt of this very
        call replaced it and its answer was lost.

        Raises:
            UnsupportedError: The store can't.
        """
        ...


@runtime_checkable
class Upload(Protocol):
    """Uploads in parts, for the self-test: `Put.put` makes them where a body is large."""

    @property
    def part_bytes(self) -> int:
        """Bodies of more bytes are uploaded in parts."""
        ...

    def abandon(self, key: str) -> None:
        """Begin an upload in parts, and abort it. The object stays what it was.

        Raises:
            AuthError: The credentials may not abort: what broken uploads leave stays, invisible and charged for.
        """
        ...
