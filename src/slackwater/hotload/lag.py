"""How far replicas are behind the newest committed version, and whom that alarms. Values in, values out.

The rules:

1. A version is committed, for this process, when it first sees it: no other machine's clock matters.
2. A replica has been behind since the first version above its own was committed. While the head doesn't move and the
   replica is there, nothing is behind, however long that lasts.
3. Only one that serves is behind, and never for longer than its present start has been heard to serve and follow: what
   a start takes, and what was missed before it or on somebody's order, is no lag.
4. Who follows the head and is behind for longer than a limit is an alarm, once: the next one comes after it was
   at most half as late, or not late at all. A replica that isn't heard changes nothing.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from slackwater.hotload.target import TargetStatus
from slackwater.ids import ReplicaId, Version

MAX_SIGHTINGS: Final = 4096
"""Moves of the head that are remembered. Who is further behind than that has been for longer than is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """The head as it was first seen."""

    version: Version
    at: float
    """Monotonic seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Follower:
    """One replica that serves and follows the head."""

    boot_id: str
    """The start of it that does."""
    since: float
    """When that was first heard, without a break since; monotonic seconds."""


Sightings = tuple[Sighting, ...]
"""How the head has moved, the oldest first; versions and times rise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lag:
    """How far one replica is behind."""

    behind: int
    """Versions that are newer than its own."""
    behind_s: float | None
    """Seconds for which there has been a newer one; None where it isn't to follow the head."""


def sighted(known: Sightings, version: Version, at: float) -> Sightings:
    """What is known after the head was seen at ``version``; an older one is no news."""
    if known and version <= known[-1].version:
        return known
    kept = known if len(known) < MAX_SIGHTINGS else (known[0], *known[2:])
    return (*kept, Sighting(version=version, at=at))


def heard_of(followers: Mapping[ReplicaId, Follower], status: TargetStatus, now: float) -> Mapping[ReplicaId, Follower]:
    """Who follows, after one replica was heard; who isn't heard stays as it was."""
    before = followers.get(status.replica)
    if status.state != "serving" or status.mode != "follow":
        return {name: each for name, each in followers.items() if name != status.replica}
    if before is not None and before.boot_id == status.boot_id:
        return followers
    return {**followers, status.replica: Follower(boot_id=status.boot_id, since=now)}


def lag_of(known: Sightings, followers: Mapping[ReplicaId, Follower], status: TargetStatus, now: float) -> Lag | None:
    """How far a replica is behind; None while the head isn't known, or it serves nothing."""
    if not known or status.version is None or status.state != "serving":
        return None
    held = status.version
    behind = max(0, known[-1].version - held)
    if status.mode != "follow":
        return Lag(behind=behind, behind_s=None)
    follower = followers.get(status.replica)
    begun = now if follower is None or follower.boot_id != status.boot_id else follower.since
    since = max(begun, next((each.at for each in known if each.version > held), now))
    return Lag(behind=behind, behind_s=now - since)


def alarmed(
    before: Collection[ReplicaId], lags: Mapping[ReplicaId, Lag], limit_s: float
) -> tuple[frozenset[ReplicaId], frozenset[ReplicaId]]:
    """Who is in alarm after ``before``, and who of them is so only now."""
    late = {name: lag.behind_s or 0.0 for name, lag in lags.items()}
    new = frozenset(name for name, seconds in late.items() if seconds > limit_s and name not in before)
    still = frozenset(name for name in before if late.get(name, limit_s) > limit_s / 2)
    return still | new, new
