"""Looks at the lineage that hold no call for longer than a limit, whatever the bucket does."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from slackwater.clock import Clock
from slackwater.errors import NotFoundError, SlackwaterError, UnavailableError
from slackwater.hotload.snapshots import Snapshot, SnapshotLookup
from slackwater.ids import RunId, Version, snapshot_name

T = TypeVar("T")


class Lookup:
    """A `SnapshotLookup` asked from the event loop.

    Args:
        snapshots: Whose calls block.
        clock: Measures the limit.
        limit_s: Seconds that a call waits for the bucket.
    """

    def __init__(self, snapshots: SnapshotLookup, clock: Clock, limit_s: float) -> None:
        self.run: Final[RunId] = snapshots.run
        self._snapshots = snapshots
        self._clock = clock
        self._limit_s = limit_s

    async def find(self, version: Version) -> Snapshot:
        """See `SnapshotLookup.find`; the hint of a NotFoundError names the newest one.

        Raises:
            UnavailableError: The bucket didn't answer in time.
        """
        return await self._in_time(lambda: self._found(version))

    async def chain(self) -> tuple[Snapshot, ...]:
        """See `SnapshotLookup.chain`; raises as `find`."""
        return await self._in_time(self._snapshots.chain)

    async def head(self, known: Version) -> Version:
        """The newest version above ``known`` that is committed without a gap; ``known`` where there is none.

        Raises:
            UnavailableError: The bucket didn't answer in time.
            CorruptError: The manifest of the next one doesn't verify.
        """
        while True:
            above = Version(known + 1)
            try:
                await self._in_time(partial(self._snapshots.find, above))
            except NotFoundError:
                return known
            known = above

    def _found(self, version: Version) -> Snapshot:
        try:
            return self._snapshots.find(version)
        except NotFoundError as error:
            raise NotFoundError(error.message, hint=self._newest()) from error

    def _newest(self) -> str:
        try:
            newest = self._snapshots.newest()
        except SlackwaterError:  # that the one asked for isn't there is known all the same
            return ""
        if newest is None:
            return f"no version of {self.run} is committed yet"
        return f"the newest is {snapshot_name(self.run, newest)}"

    async def _in_time(self, look: Callable[[], T]) -> T:
        found = asyncio.ensure_future(asyncio.to_thread(look))
        timer = asyncio.ensure_future(self._clock.sleep(self._limit_s))
        try:
            await asyncio.wait((found, timer), return_when=asyncio.FIRST_COMPLETED)
            if found.done():
                return found.result()
        finally:
            timer.cancel()
            found.cancel()
        raise UnavailableError(f"the bucket didn't answer within {self._limit_s:g} s", hint="ask again")
