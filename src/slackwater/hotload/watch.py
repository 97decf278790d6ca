"""Watches the whole fleet for as long as its conductor lives: who has strayed, where the head is, who lags."""

import logging
from collections.abc import Awaitable, Callable, Sequence

from slackwater.clock import Clock
from slackwater.errors import SlackwaterError
from slackwater.hotload.lookup import Lookup
from slackwater.hotload.roll import Roll
from slackwater.hotload.target import TargetStatus
from slackwater.ids import Version

_log = logging.getLogger(__name__)


class Watch:
    """One task's work, `run`.

    Args:
        roll: The fleet.
        lookup: Its lineage.
        clock: The machine's.
        poll_s: Seconds between two rounds.
        bring_back: Given what each replica that answers says of itself; sees to those that have strayed.
    """

    def __init__(
        self,
        roll: Roll,
        lookup: Lookup,
        clock: Clock,
        poll_s: float,
        bring_back: Callable[[Sequence[TargetStatus]], Awaitable[None]],
    ) -> None:
        self._roll = roll
        self._lookup = lookup
        self._clock = clock
        self._poll_s = poll_s
        self._bring_back = bring_back
        self._trouble = ""

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            await self._clock.sleep(self._poll_s)
            told = [member.status for member in await self._roll.everyone()]
            heard = [status for status in told if status is not None and status.run == self._lookup.run]
            await self._bring_back(heard)
            await self._look_for_head(heard)
            self._roll.alarm(heard)

    async def _look_for_head(self, heard: Sequence[TargetStatus]) -> None:
        """Go up from what replicas know; a bucket that can't be asked is a warning, once for each trouble."""
        versions = [version for each in heard for version in (each.version, each.target) if version is not None]
        if self._roll.head is not None:
            versions.append(self._roll.head)
        if versions:
            self._roll.saw_head(known := max(versions))
            began = self._clock.monotonic()
            if (found := await self._above(known)) is not None:
                self._roll.saw_head(found, looked_at=began)

    async def _above(self, known: Version) -> Version | None:
        try:
            found = await self._lookup.head(known)
        except SlackwaterError as error:
            if error.kind != self._trouble:
                _log.warning("the newest version can't be looked for: %s", error)
            self._trouble = error.kind
            return None
        self._trouble = ""
        return found
