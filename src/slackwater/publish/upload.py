"""Uploads that run while more is being made: a bounded number at a time, and none after the first failure."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, Protocol

from slackwater.bucket.base import Get, Put
from slackwater.checkpoint.manifest import ObjectRef
from slackwater.errors import CorruptError, NotFoundError
from slackwater.ids import ObjectDigest
from slackwater.publish.delta import Progress
from slackwater.publish.objects import check_object

_WAITING: Final = 2
"""Objects taken per thread before `Uploads.put` blocks: what is made faster than it is sent isn't piled up."""


class GetPut(Get, Put, Protocol):
    """What a bucket must do to take objects."""


class Uploads:
    """Objects on their way to a bucket. Given and finished by one thread at a time.

    Args:
        bucket: Where to.
        threads: Objects sent at once.
        check: Called before each object is sent; what it raises stops them all.
    """

    def __init__(self, bucket: GetPut, *, threads: int, check: Callable[[], None]) -> None:
        self._bucket: Final = bucket
        self._check: Final = check
        self._limit: Final = threads * _WAITING
        self._pool: Final = ThreadPoolExecutor(threads, thread_name_prefix="upload")
        self._pending: Final[deque[Future[int]]] = deque()
        self._failed: Final = threading.Event()
        self._total = 0
        self._done = 0

    def put(self, ref: ObjectRef, body: bytes | bytearray) -> None:
        """Take an object. Blocks while many are on their way; raises what stopped an earlier one."""
        for future in self._pending:
            if future.done():
                future.result()
        while len(self._pending) >= self._limit:
            self._done += self._pending.popleft().result()
        self._total += ref.size
        self._pending.append(self._pool.submit(self._send, ref, body))

    def finish(self, progress: Progress) -> None:
        """Return once all objects are there.

        Args:
            progress: Told the stage ``upload`` in bytes.

        Raises:
            SlackwaterError: What stopped the first one that failed.
        """
        while self._pending:
            self._done += self._pending.popleft().result()
            progress("upload", self._done, self._total)
        self.stop()

    def stop(self) -> None:
        """Send nothing more; returns once nothing is on its way."""
        self._pool.shutdown(cancel_futures=True)

    @contextmanager
    def or_stop(self) -> Generator[None]:
        """Stop where the block raises."""
        with ExitStack() as undo:
            undo.callback(self.stop)
            yield
            undo.pop_all()

    def _send(self, ref: ObjectRef, body: bytes | bytearray) -> int:
        """Upload an object, unless an earlier attempt did: its name is made from its content."""
        self._check()
        if self._failed.is_set():
            raise CancelledError("an upload before this one failed")
        with ExitStack() as undo:
            undo.callback(self._failed.set)
            if not is_there(self._bucket, ref):
                self._bucket.put(ref.key, memoryview(body))
            undo.pop_all()
        return ref.size


def linkable(bucket: Get, files: Mapping[str, ObjectRef]) -> Mapping[ObjectDigest, ObjectRef]:
    """The files of an earlier anchor that a new one may name: they are there, as long as they should be.

    One byte of each is read, its last: that they are whole was seen when they were uploaded or last read.
    """
    found: dict[ObjectDigest, ObjectRef] = {}
    for ref in files.values():
        if ref.size:
            with suppress(NotFoundError, CorruptError):
                bucket.get_range(ref.key, ref.size - 1, 1)
                found[ref.sha256] = ref
    return found


def is_there(bucket: Get, ref: ObjectRef) -> bool:
    """Whether an object is there and right: it is read back, in pieces.

    Its name alone proves nothing, for it may have been spoilt since. An absent one, as nearly all are, costs a call.
    """
    try:
        for _ in check_object(bucket, ref):
            pass
    except (NotFoundError, CorruptError):
        return False
    return True
