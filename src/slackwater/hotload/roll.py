"""Asks and tells replicas, one or all, and keeps what they say."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from slackwater.clock import Clock
from slackwater.config.in_flight import InFlight
from slackwater.errors import SlackwaterError
from slackwater.hotload.book import Book
from slackwater.hotload.lag import Follower, Lag, Sighting, Sightings, alarmed, heard_of, lag_of, sighted
from slackwater.hotload.target import Goal, Target, TargetError, TargetStatus
from slackwater.hotload.witness import FleetEvent
from slackwater.ids import ReplicaId, Version

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetMember:
    """One replica as it was heard just now."""

    replica: ReplicaId
    status: TargetStatus | None
    """None where it didn't answer; ``error`` says why."""
    error: TargetError | None
    behind: int | None = None
    """Versions that are newer than its own; None while that isn't known, or it doesn't serve."""
    behind_s: float | None = None
    """Seconds for which there has been a newer one; None also where it doesn't follow the head."""


class Roll:
    """The fleet of one conductor. All calls from one event loop.

    Args:
        targets: By name.
        book: Keeps what they say.
        clock: The machine's.
        lag_limit_s: Seconds that one who follows may be behind before that is an alarm.
    """

    def __init__(self, targets: Mapping[ReplicaId, Target], book: Book, clock: Clock, lag_limit_s: float) -> None:
        self._targets = targets
        self._book = book
        self._clock = clock
        self._lag_limit_s = lag_limit_s
        self._heads: Sightings = ()
        self._looked_at: float | None = None
        self._followers: Mapping[ReplicaId, Follower] = {}
        self._late: frozenset[ReplicaId] = frozenset()

    @property
    def head(self) -> Version | None:
        """The newest committed version that was seen."""
        return self._heads[-1].version if self._heads else None

    @property
    def looked_at(self) -> float | None:
        """When the last look at the bucket that told the head began, in monotonic seconds; None before the first."""
        return self._looked_at

    async def everyone(self) -> tuple[FleetMember, ...]:
        """Every replica as it is now; a silent one has an error."""
        return await self.some(self._targets)

    async def some(
        self, names: Iterable[ReplicaId], goal: Goal | None = None, in_flight: InFlight | None = None
    ) -> tuple[FleetMember, ...]:
        """Those replicas as they are now, or after they were told ``goal``."""
        asked = (self.ask(name, goal, in_flight) for name in names if name in self._targets)
        return tuple(await asyncio.gather(*asked))

    async def ask(self, name: ReplicaId, goal: Goal | None = None, in_flight: InFlight | None = None) -> FleetMember:
        """One replica as it is now, or after it was told ``goal``."""
        target = self._targets[name]
        try:
            status = await (target.status() if goal is None else target.set_target(goal, in_flight))
        except SlackwaterError as error:
            told = TargetError(kind=error.kind, message=str(error))
            return FleetMember(replica=name, status=None, error=told)
        self._book.saw(status)
        now = self._clock.monotonic()
        self._followers = heard_of(self._followers, status, now)
        lag = lag_of(self._heads, self._followers, status, now)
        behind, behind_s = (None, None) if lag is None else (lag.behind, lag.behind_s)
        return FleetMember(replica=name, status=status, error=None, behind=behind, behind_s=behind_s)

    async def hold(self, names: Iterable[ReplicaId]) -> tuple[TargetStatus, ...]:
        """Tell replicas to stay where they are; one that can't be told is a warning. What the others say."""
        held = await self.some(names, "stay")
        for member in held:
            if member.error is not None:
                _log.warning("replica %s could not be told to stay: %s", member.replica, member.error.message)
        return tuple(member.status for member in held if member.status is not None)

    def saw_head(self, version: Version, looked_at: float | None = None) -> None:
        """Note that ``version`` is committed; and the newest one, where the bucket was asked: when that began."""
        self._looked_at = self._looked_at if looked_at is None else looked_at
        self._heads = sighted(self._heads, version, self._clock.monotonic())

    def alarm(self, heard: Collection[TargetStatus]) -> None:
        """Warn of those who have been behind for too long, once, and note it."""
        now = self._clock.monotonic()
        found = {each.replica: lag_of(self._heads, self._followers, each, now) for each in heard}
        lags = {name: lag for name, lag in found.items() if lag is not None}
        self._late, new = alarmed(self._late, lags, self._lag_limit_s)
        for status in heard:
            if status.replica in new:
                self._warn(status, lags[status.replica], self._heads[-1])

    def _warn(self, status: TargetStatus, lag: Lag, head: Sighting) -> None:
        late = f"{lag.behind} behind {head.version} for {lag.behind_s or 0.0:.0f} s"
        _log.warning("replica %s lags: it serves version %s, %s", status.replica, status.version, late)
        event = FleetEvent(
            at=self._clock.wall(), kind="lagging", replica=status.replica, version=status.version, detail=late
        )
        self._book.note(event)
