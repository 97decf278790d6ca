"""The head hint, written no more often than stores bear: some allow one object about one change a second."""

from typing import Final

from slackwater.bucket.base import Put
from slackwater.clock import Clock
from slackwater.ids import RunId, Version
from slackwater.publish.commit import write_hint

HINT_EVERY_S: Final = 1.0
"""Seconds from one hint to the next; readers find the versions between by their numbers."""


class HintWriter:
    """Writes a run's head hint, best effort. For one publisher.

    Args:
        bucket: Where to.
        run: The run.
        clock: Its monotonic time says when the next hint may be written.
    """

    def __init__(self, bucket: Put, run: RunId, clock: Clock) -> None:
        self._bucket: Final = bucket
        self._run: Final = run
        self._clock: Final = clock
        self._due: Version | None = None
        """What readers aren't told yet."""
        self._tried_s: float | None = None

    def wrote(self, version: Version) -> None:
        """A version was committed: write the hint, unless the last one is younger than `HINT_EVERY_S`."""
        self._due = version
        if self._tried_s is None or self._clock.monotonic() - self._tried_s >= HINT_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write the hint that was left out last, if any, or that failed. Idempotent."""
        if self._due is not None:
            self._tried_s = self._clock.monotonic()
            if write_hint(self._bucket, self._run, self._due):
                self._due = None
