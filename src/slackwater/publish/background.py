"""Versions that are uploaded and committed in the background, one at a time."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Final, Generic, TypeVar

from slackwater.errors import InvalidInputError
from slackwater.weights.source import Follows, TensorSource

ROOM_BYTES: Final = 256 * 1024 * 1024
"""Most changes that are held in memory, to be encoded in the background."""

_Done = TypeVar("_Done")


def check_may_wait(source: TensorSource) -> None:
    """Check that a source may be written before its version is committed.

    Raises:
        InvalidInputError: It takes over what was committed.
    """
    if isinstance(source, Follows):
        raise InvalidInputError(
            "this source takes over what was committed, so it must not be written before that",
            hint="use publish(), or publish a StateDictSource in the background",
        )


class Withdrawal:
    """Whether a version may still be taken back: until its commit begins."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._is_withdrawn = False
        self._is_committing = False

    def withdraw(self) -> bool:
        """Take it back; False: its commit has begun."""
        with self._lock:
            self._is_withdrawn = not self._is_committing
            return self._is_withdrawn

    def check(self) -> None:
        """Go on unless it was taken back.

        Raises:
            CancelledError: It was.
        """
        if self._is_withdrawn:
            raise CancelledError("the version was cancelled before its commit")

    def begin_commit(self) -> None:
        """From here on it can't be taken back.

        Raises:
            CancelledError: It was before.
        """
        with self._lock:
            self.check()
            self._is_committing = True


class Handle(Generic[_Done]):
    """A version on its way. May be asked from any thread."""

    def __init__(self, future: Future[_Done], withdrawal: Withdrawal) -> None:
        self._future: Final = future
        self._withdrawal: Final = withdrawal
        self.is_told = False
        """Whether somebody has learned how it ended."""

    def result(self, timeout: float | None = None) -> _Done:
        """Wait until it is committed.

        Args:
            timeout: Seconds; None waits as long as it takes.

        Raises:
            TimeoutError: It isn't yet.
            CancelledError: It was cancelled.
            SlackwaterError: It failed; nothing of it is visible, unless the commit itself was not answered.
        """
        wait([self._future], timeout)
        self.is_told = self._future.done()
        return self._future.result(0)

    def done(self) -> bool:
        """Whether it has ended, one way or another."""
        return self._future.done()

    def cancel(self) -> bool:
        """Take it back; the next version holds its changes. False: its commit has begun, so that it is too late."""
        is_withdrawn = self._withdrawal.withdraw()
        self.is_told = self.is_told or is_withdrawn
        return is_withdrawn

    def wait(self) -> None:
        """Wait until it has ended; raises nothing."""
        wait([self._future])


class Background(Generic[_Done]):
    """Does one piece of work at a time, in a thread that starts with the first."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Handle[_Done] | None = None
        self._is_closed = False

    def take_turn(self) -> None:
        """Wait for the work before, and raise what it failed of, unless its handle has told that.

        Raises:
            InvalidInputError: It was closed.
            SlackwaterError: What failed.
        """
        if self._is_closed:
            raise InvalidInputError("the publisher was closed", hint="open another one")
        last = self._last
        if last is None:
            return
        last.wait()  # interrupted here, it is waited for again
        self._last = None
        if not last.is_told:
            last.result()

    def settle(self) -> None:
        """Wait for the work before; raises nothing."""
        last = self._last
        if last is not None:
            last.wait()

    def start(self, work: Callable[[], _Done], withdrawal: Withdrawal) -> Handle[_Done]:
        """Do something, after `take_turn`."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._last = Handle(self._pool.submit(work), withdrawal)
        return self._last

    def close(self) -> None:
        """Wait for the work before, take no more, and raise what it failed of, unless its handle has told that."""
        if self._is_closed:
            return
        try:
            self.take_turn()
        finally:
            self._is_closed = True
            if self._pool is not None:
                self._pool.shutdown()
