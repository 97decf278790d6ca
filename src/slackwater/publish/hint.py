"""The head hint, written no more often than stores bear: some allow one object about one change a second."""

from typing import Final, Protocol

from slackwater.bucket.base import Get, Put
from slackwater.clock import Clock
from slackwater.errors import SlackwaterError
from slackwater.ids import RunId, Version
from slackwater.publish.commit import write_hint
from slackwater.publish.lineage import read_hint

HINT_EVERY_S: Final = 1.0
"""Seconds from one hint to the next; readers find the versions between by their numbers."""


class HintBucket(Get, Put, Protocol):
    """What a bucket must do to take hints."""


class HintWriter:
    """Writes a run's head hint, best effort. For one publisher.

    Args:
        bucket: Where to.
        run: The run.
        clock: Its monotonic time says when the next hint may be written.
    """

    def __init__(self, bucket: HintBucket, run: RunId, clock: Clock) -> None:
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
            self._write(version)

    def flush(self) -> None:
        """Write the hint that was left out last, if any, or that failed, unless there is a newer one. Idempotent."""
        if self._due is not None and not self._is_newer(self._due):
            self._write(self._due)

    def _write(self, version: Version) -> None:
        self._tried_s = self._clock.monotonic()
        if write_hint(self._bucket, self._run, version):
            self._due = None

    def _is_newer(self, version: Version) -> bool:
        """Whether another publisher has gone on, so that this hint would lead readers back."""
        try:
            hint = read_hint(self._bucket, self._run)
        except SlackwaterError:
            return False
        return hint is not None and hint > version
