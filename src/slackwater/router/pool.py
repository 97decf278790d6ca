"""The table of replicas: what probes say of them, what is reserved on them, and who is out. Pure: no I/O, no clock."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from slackwater.errors import ConflictError, NotFoundError
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.rollout.routes import Routing
from slackwater.router.policy import Candidate, Choice, Health, Refusal, RoutingContext, choose

FAILURES_TO_EJECT: Final = 3
"""Probes failed in a row that put a replica out. One slow answer of a busy replica is no failure of its work."""
GOODS_TO_RETURN: Final = 2
"""Probes answered in a row that bring it back."""
SERVING: Final = "serving"
"""The one status under which a replica gets requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """What a replica says of itself."""

    status: str
    """`SERVING`, or why not."""
    run: RunId | None = None
    version: Version | None = None
    boot: BootId | None = None
    in_flight: int = 0
    draining: bool = False
    """It keeps new requests waiting until others have ended."""
    window: int | None = None
    """Context window in tokens."""
    routing: Routing | None = None
    """What the model's routers choose from; None: it has none, or the replica doesn't tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """One request's place on a replica. Releasing it twice is releasing it once."""

    number: int
    replica: ReplicaId
    reason: str
    """Why this replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """A replica's health changed."""

    replica: ReplicaId
    before: Health
    after: Health


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One row of the table."""

    replica: ReplicaId
    model: str = ""
    health: Health = Health.UNKNOWN
    report: ProbeReport | None = None
    """The last answer."""
    failures: int = 0
    """Probes failed since the last good one."""
    goods: int = 0
    """Probes answered since the last failure."""
    foreign: int = 0
    """Requests of others that it worked on at its last answer."""
    last_chosen: int = 0


class Pool:
    """The table. Every change returns what it did; nothing here waits."""

    def __init__(self) -> None:
        self._members: dict[ReplicaId, Member] = {}
        self._reserved: set[int] = set()
        self._loads: Counter[ReplicaId] = Counter()
        self._numbers = 0

    @property
    def members(self) -> Mapping[ReplicaId, Member]:
        """All rows, in the order of joining."""
        return dict(self._members)

    def add(self, replica: ReplicaId, *, model: str = "") -> None:
        """Add a replica; it gets nothing until it answers a probe.

        Raises:
            ConflictError: It is there already.
        """
        if replica in self._members:
            raise ConflictError(f"replica {replica} is in the pool already", hint="remove it first")
        self._members[replica] = Member(replica=replica, model=model)

    def remove(self, replica: ReplicaId) -> None:
        """Take a replica out. Its reservations stay until they are released.

        Raises:
            NotFoundError: It isn't there.
        """
        self._member(replica)
        del self._members[replica]

    def reserve(self, context: RoutingContext) -> Reservation | Refusal:
        """Choose a replica and take a place on it."""
        choice = choose(context, [self._candidate(member) for member in self._members.values()])
        if isinstance(choice, Refusal):
            return choice
        return self._take(choice)

    def release(self, reservation: Reservation) -> bool:
        """Give a place back. False: it was given back before."""
        if reservation.number not in self._reserved:
            return False
        self._reserved.remove(reservation.number)
        self._loads[reservation.replica] -= 1
        return True

    def in_flight(self, replica: ReplicaId) -> int:
        """Places taken on a replica here."""
        return self._loads[replica]

    @property
    def total_in_flight(self) -> int:
        """Places taken on all replicas here."""
        return len(self._reserved)

    def report(self, replica: ReplicaId, report: ProbeReport | None) -> Transition | None:
        """Record a probe's outcome; None: it failed. Outcomes for a replica that has left are dropped."""
        before = self._members.get(replica)
        if before is None:
            return None
        after = _failed(before) if report is None else _answered(before, report, self.in_flight(replica))
        return self._put(before, after)

    def lost(self, replica: ReplicaId) -> Transition | None:
        """Record that a connection broke while the replica served. An answer, even a bad one, is no loss."""
        before = self._members.get(replica)
        if before is None or before.health is not Health.GOOD:
            return None
        return self._put(before, replace(before, health=Health.SUSPECT))

    def _take(self, choice: Choice) -> Reservation:
        self._numbers += 1
        self._reserved.add(self._numbers)
        self._loads[choice.replica] += 1
        member = self._members[choice.replica]
        self._members[choice.replica] = replace(member, last_chosen=self._numbers)
        return Reservation(number=self._numbers, replica=choice.replica, reason=choice.reason)

    def _put(self, before: Member, after: Member) -> Transition | None:
        self._members[after.replica] = after
        if before.health is after.health:
            return None
        return Transition(replica=after.replica, before=before.health, after=after.health)

    def _member(self, replica: ReplicaId) -> Member:
        try:
            return self._members[replica]
        except KeyError:
            raise NotFoundError(f"replica {replica} isn't in the pool") from None

    def _candidate(self, member: Member) -> Candidate:
        report = member.report
        return Candidate(
            replica=member.replica,
            health=member.health,
            serving=report is not None and report.status == SERVING,
            draining=report is not None and report.draining,
            version=report.version if report else None,
            run=report.run if report else None,
            in_flight=member.foreign + self.in_flight(member.replica),
            last_chosen=member.last_chosen,
            model=member.model,
        )


def _failed(member: Member) -> Member:
    failures = member.failures + 1
    health = Health.EJECTED if failures >= FAILURES_TO_EJECT else member.health
    return replace(member, failures=failures, goods=0, health=health)


def _answered(member: Member, report: ProbeReport, own: int) -> Member:
    goods = member.goods + 1
    returns = member.health is not Health.EJECTED or goods >= GOODS_TO_RETURN
    return replace(
        member,
        report=report,
        failures=0,
        goods=goods,
        health=Health.GOOD if returns else Health.EJECTED,
        foreign=max(0, report.in_flight - own),
    )
