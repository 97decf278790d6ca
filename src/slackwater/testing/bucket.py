"""Buckets for tests: one in memory, and one that fails as its script says."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, TypeVar

from slackwater.bucket.base import Bucket, ObjectInfo, Unfinished
from slackwater.bucket.key import check_key, check_prefix, check_range
from slackwater.errors import CorruptError, NotFoundError

T = TypeVar("T")

Verb = Literal["get", "get_range", "put", "put_if_absent", "list"]
"""The verbs of a bucket."""


class MemoryBucket:
    """The reference: a bucket in this process's memory. Safe for any number of threads."""

    def __init__(self, name: str = "test") -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._uploads: dict[str, Unfinished] = {}
        self._numbers = count()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """``memory://<name>``."""
        return f"memory://{self._name}"

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `slackwater.bucket.base.Get.get`."""
        body = self._body(key)
        if len(body) > max_bytes:
            raise CorruptError(f"{self.url}/{key} has {len(body)} bytes, at most {max_bytes} are expected")
        return body

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `slackwater.bucket.base.Get.get_range`."""
        check_key(key)
        check_range(start, length)
        if length == 0:
            return b""
        body = self._body(key)
        if len(body) < start + length:
            raise CorruptError(f"{self.url}/{key} has {len(body)} bytes, too few for [{start}, {start + length})")
        return body[start : start + length]

    def put(self, key: str, body: bytes | memoryview) -> None:
        """See `slackwater.bucket.base.Put.put`."""
        with self._lock:
            self._objects[check_key(key)] = bytes(body)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """See `slackwater.bucket.base.PutIfAbsent.put_if_absent`."""
        with self._lock:
            return self._objects.setdefault(check_key(key), made := bytes(memoryview(body))) is made

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `slackwater.bucket.base.List.list`."""
        below = check_prefix(prefix) + "/" if prefix else ""
        with self._lock:
            found = [
                ObjectInfo(key=key, size=len(body)) for key, body in self._objects.items() if key.startswith(below)
            ]
        return iter(found)

    def delete(self, key: str) -> None:
        """Lose an object, as no bucket should."""
        with self._lock:
            self._objects.pop(key, None)

    def begin(self, key: str, *, started_s: float | None = None) -> Unfinished:
        """Begin a write that never ends, as a writer leaves it that is killed."""
        with self._lock:
            upload = Unfinished(key=check_key(key), upload=f"upload-{next(self._numbers)}", started_s=started_s)
            self._uploads[upload.upload] = upload
        return upload

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """See `slackwater.bucket.base.Abort.unfinished`."""
        below = check_prefix(prefix) + "/" if prefix else ""
        with self._lock:
            return iter([upload for upload in self._uploads.values() if upload.key.startswith(below)])

    def abort(self, upload: Unfinished) -> None:
        """See `slackwater.bucket.base.Abort.abort`."""
        check_key(upload.key)
        with self._lock:
            self._uploads.pop(upload.upload, None)

    def _body(self, key: str) -> bytes:
        with self._lock:
            body = self._objects.get(check_key(key))
        if body is None:
            raise NotFoundError(f"no such object: {self.url}/{key}")
        return body


class Gate:
    """Holds a call until the test opens it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        """Set once a call waits here."""
        self._open = threading.Event()

    def open(self) -> None:
        """Let every call through, now and later."""
        self._open.set()

    def hold(self, seconds: float = 30.0) -> None:
        """Wait until the gate opens; a test that forgot it fails instead of hanging.

        Raises:
            TimeoutError: It stayed shut.
        """
        self.reached.set()
        if not self._open.wait(seconds):
            raise TimeoutError("the test never opened the gate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What goes wrong, in which calls. Several fields together happen in the order of their listing."""

    verb: Verb
    key: str = ""
    """Calls whose key (or prefix) contains this; empty: all."""
    times: int = 1
    """Calls it meets; then it is spent."""
    gate: Gate | None = None
    """Wait here first."""
    before: Exception | None = None
    """Raise this; nothing happened."""
    after: Exception | None = None
    """Let it happen, then raise this: the answer was lost."""
    flip: int | None = None
    """Flip the lowest bit of this byte of what was read."""
    cut: int | None = None
    """Keep this many bytes of what was read."""

    def spoil(self, body: bytes) -> bytes:
        """What the reader receives of ``body``."""
        spoilt = bytearray(body)
        if self.flip is not None and spoilt:
            spoilt[self.flip] ^= 1
        return bytes(spoilt[: self.cut])


@dataclass(slots=True)
class _Pending:
    fault: Fault
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.fault.times


class FaultyBucket:
    """A bucket around another one that fails as its script says and counts what is asked of it.

    Each call meets the first fault of the script that fits it and isn't spent.

    Args:
        inner: The bucket that does the work.
        script: Faults, tried in order.
    """

    def __init__(self, inner: Bucket, *script: Fault) -> None:
        self._inner = inner
        self._script = [_Pending(fault) for fault in script]
        self._calls: Counter[tuple[Verb, str]] = Counter()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The inner bucket's."""
        return self._inner.url

    def add(self, fault: Fault) -> None:
        """Add a fault to the end of the script."""
        with self._lock:
            self._script.append(_Pending(fault))

    def count(self, verb: Verb, key: str = "") -> int:
        """Calls of ``verb`` so far, failed ones too, whose key contains ``key``."""
        with self._lock:
            return sum(times for (asked, name), times in self._calls.items() if asked == verb and key in name)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `slackwater.bucket.base.Get.get`."""
        return self._read("get", key, lambda: self._inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `slackwater.bucket.base.Get.get_range`."""
        return self._read("get_range", key, lambda: self._inner.get_range(key, start, length))

    def put(self, key: str, body: bytes | memoryview) -> None:
        """See `slackwater.bucket.base.Put.put`."""
        self._call(self._met("put", key), lambda: self._inner.put(key, body))

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """See `slackwater.bucket.base.PutIfAbsent.put_if_absent`."""
        return self._call(self._met("put_if_absent", key), lambda: self._inner.put_if_absent(key, body))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `slackwater.bucket.base.List.list`."""
        return self._call(self._met("list", prefix), lambda: self._inner.list(prefix))

    def _read(self, verb: Verb, key: str, read: Callable[[], bytes]) -> bytes:
        fault = self._met(verb, key)
        body = self._call(fault, read)
        return fault.spoil(body) if fault else body

    def _call(self, fault: Fault | None, work: Callable[[], T]) -> T:
        if fault and fault.gate:
            fault.gate.hold()
        if fault and fault.before:
            raise fault.before
        answer = work()
        if fault and fault.after:
            raise fault.after
        return answer

    def _met(self, verb: Verb, key: str) -> Fault | None:
        with self._lock:
            self._calls[verb, key] += 1
            for pending in self._script:
                if pending.left and pending.fault.verb == verb and pending.fault.key in key:
                    pending.left -= 1
                    return pending.fault
        return None
