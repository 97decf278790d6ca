"""The operation machine: one hot-load over a fleet, as a value. Values in, values out.

The rules:

1. An operation names one snapshot, or the head, and ends in exactly one way; an ended one never changes again.
2. It ends when every replica has settled: with the version in place and verified, or with its own error.
3. A replica that doesn't answer by the deadline is ``unknown``: it may have the version or not.
4. One operation drives a replica at a time. A newer one supersedes those it shares replicas with.
5. Cancelling ends the operation. What a replica has committed by then stays.
6. A standing operation ends by those two ways alone: until then it brings back whoever strays.
7. A pair that the table lacks is illegal: a ConflictError that names operation, state and event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from slackwater.config.in_flight import InFlight
from slackwater.errors import CanaryError, ConflictError, SwapError
from slackwater.hotload.rollout import Canary, Phase, told_in
from slackwater.hotload.target import Goal, SwapTimings, TargetError, TargetStatus
from slackwater.ids import ReplicaId, RunId, Version


class OperationState(StrEnum):
    """Where an operation stands."""

    QUEUED = "queued"
    """Accepted; no replica was told."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    """Every replica serves the version, verified."""
    PARTLY_FAILED = "partly_failed"
    """Some do: see each replica's stage."""
    FAILED = "failed"
    """None does."""
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    """A newer operation took its place."""


class OperationEvent(StrEnum):
    """What happened to an operation."""

    START = "start"
    ALL_DONE = "all_done"
    SOME_DONE = "some_done"
    NONE_DONE = "none_done"
    CANCEL = "cancel"
    SUPERSEDE = "supersede"


_S, _E = OperationState, OperationEvent

MOVES: Final[Mapping[tuple[OperationState, OperationEvent], OperationState]] = MappingProxyType({
    (_S.QUEUED, _E.START): _S.RUNNING,
    (_S.QUEUED, _E.CANCEL): _S.CANCELLED,
    (_S.QUEUED, _E.SUPERSEDE): _S.SUPERSEDED,
    (_S.RUNNING, _E.ALL_DONE): _S.SUCCEEDED,
    (_S.RUNNING, _E.SOME_DONE): _S.PARTLY_FAILED,
    (_S.RUNNING, _E.NONE_DONE): _S.FAILED,
    (_S.RUNNING, _E.CANCEL): _S.CANCELLED,
    (_S.RUNNING, _E.SUPERSEDE): _S.SUPERSEDED,
})  # fmt: skip
"""Every legal transition. A missing key is an illegal one."""

ENDED: Final = frozenset(_S) - {_S.QUEUED, _S.RUNNING}
"""States that never change again."""


class ReplicaStage(StrEnum):
    """How far one replica is with an operation."""

    PENDING = "pending"
    """Not told yet, or it can't take a target yet; ``error`` says why."""
    UNDER_WAY = "under_way"
    """It has taken the target."""
    DONE = "done"
    """The version is in place and verified."""
    FAILED = "failed"
    UNKNOWN = "unknown"
    """It doesn't answer."""
    SKIPPED = "skipped"
    """Not told: the canary did badly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaProgress:
    """One replica's part of an operation."""

    replica: ReplicaId
    stage: ReplicaStage = ReplicaStage.PENDING
    version: Version | None = None
    """What it served when it was last heard; of a cancelled operation, what it was told to stay at."""
    error: TargetError | None = None
    boot_id: str | None = None
    """The start of it that was last heard."""
    told_at: float | None = None
    """When it first answered, in seconds since the epoch; None while it has not."""
    settled_at: float | None = None
    """When it was first seen to be where it stands now, if it has settled; seconds since the epoch."""
    timings: SwapTimings | None = None
    """Of the swap that put the version in place; None where it was there before, or the replica doesn't tell."""

    @property
    def settled(self) -> bool:
        """Whether the operation is over for this replica."""
        return self.stage in (ReplicaStage.DONE, ReplicaStage.FAILED, ReplicaStage.SKIPPED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What was asked for: two calls with one idempotency key must agree in all of it."""

    run: RunId
    version: Version | None
    """None: the head, whatever it is."""
    group: str | None = None
    replicas: tuple[ReplicaId, ...] | None = None
    """Those named; None: all of the group, or of every group that isn't pinned."""
    canary: Canary | None = None
    standing: bool = False
    """It never ends by itself, and brings back whoever strays."""
    in_flight: InFlight | None = None
    """What swaps do with answers in flight; None: each replica's default."""

    @property
    def goal(self) -> Goal:
        """What replicas are told."""
        return "head" if self.version is None else self.version


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One hot-load."""

    id: str
    idempotency_key: str
    order: Order
    created_at: float
    """Seconds since the epoch, for people."""
    state: OperationState = OperationState.QUEUED
    phase: Phase = Phase.FLEET
    replicas: tuple[ReplicaProgress, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether it never changes again."""
        return self.state in ENDED

    @property
    def names(self) -> tuple[ReplicaId, ...]:
        """The replicas it is about, those that go first in front."""
        return tuple(part.replica for part in self.replicas)

    @property
    def told(self) -> tuple[ReplicaId, ...]:
        """The replicas that this phase tells and watches."""
        return told_in(self.phase, self.names, self.order.canary)

    def part(self, replica: ReplicaId) -> ReplicaProgress:
        """One replica's part.

        Raises:
            ConflictError: The operation isn't about it.
        """
        for part in self.replicas:
            if part.replica == replica:
                return part
        raise ConflictError(f"operation {self.id} is not about replica {replica}")

    def after(self, event: OperationEvent) -> "Operation":
        """The operation after ``event``.

        Raises:
            ConflictError: The table has no such transition from here.
        """
        to = MOVES.get((self.state, event))
        if to is None:
            raise ConflictError(f"operation {self.id}: {event.value!r} is illegal in {self.state.value!r}")
        return replace(self, state=to)

    def with_progress(self, progress: ReplicaProgress) -> "Operation":
        """The operation with one replica's news."""
        parts = tuple(progress if part.replica == progress.replica else part for part in self.replicas)
        return replace(self, replicas=parts)


def judge(order: Order, status: TargetStatus) -> ReplicaProgress:
    """How far a replica is with ``order``, by what it says of itself."""

    def at(stage: ReplicaStage, error: TargetError | None = None) -> ReplicaProgress:
        return ReplicaProgress(
            replica=status.replica,
            stage=stage,
            version=status.version,
            error=error,
            boot_id=status.boot_id,
            timings=status.timings(status.version) if stage is ReplicaStage.DONE else None,
        )

    if status.state in ("retired", "closed"):
        gone = TargetError(kind="unavailable", message=f"the replica is {status.state}: restart it")
        return at(ReplicaStage.FAILED, status.last_error or gone)
    wanted = status.target if order.version is None else order.version
    if order.version is None and status.mode != "follow":
        return at(ReplicaStage.UNDER_WAY)
    if status.version == wanted and status.stage == "idle" and not status.provisional:
        return at(ReplicaStage.DONE)
    if status.waiting and status.target == wanted and status.last_error is not None:
        return at(ReplicaStage.FAILED, status.last_error)
    return at(ReplicaStage.UNDER_WAY)


def obeys(order: Order, status: TargetStatus) -> bool:
    """Whether a replica has taken ``order`` and works on it, so that telling it again would change nothing."""
    if status.state != "serving" or order.in_flight not in (None, status.swap_mode):
        return False
    if order.version is None:
        return status.mode == "follow"
    gave_up = status.waiting and order.standing and not _costly(status)
    return status.mode == "manual" and status.target == order.version and not gave_up


def _costly(status: TargetStatus) -> bool:
    """Whether trying again may cost answers in flight, as a swap that is undone does."""
    return status.last_error is not None and status.last_error.kind in (CanaryError.kind, SwapError.kind)


def news(before: ReplicaProgress, seen: ReplicaProgress, now: float) -> ReplicaProgress:
    """What is known of a replica after ``seen``: times are kept; a swap of before this operation isn't its own."""
    heard = seen.boot_id is not None
    return replace(
        seen,
        version=seen.version if heard else before.version,
        boot_id=seen.boot_id or before.boot_id,
        told_at=now if heard and before.told_at is None else before.told_at,
        settled_at=_settled_at(before, seen, now),
        timings=_timings(before, seen),
    )


def _timings(before: ReplicaProgress, seen: ReplicaProgress) -> SwapTimings | None:
    """What is done stays told as it was: a swap of before this operation isn't its own at the second look either."""
    if before.told_at is None:
        return None
    same = before.stage is seen.stage is ReplicaStage.DONE and before.version == seen.version
    return before.timings if same else seen.timings


def stayed(before: ReplicaProgress, order: Order, status: TargetStatus, now: float) -> ReplicaProgress:
    """A part of an operation that was cancelled, once its replica has said where it stays.

    One that was told nothing stays so: where it is, is the matter of the operation before.
    """
    if before.told_at is None:
        return before
    heard = news(before, judge(order, status), now)
    return heard if status.target is None else replace(heard, version=status.target)


def _settled_at(before: ReplicaProgress, seen: ReplicaProgress, now: float) -> float | None:
    if not seen.settled:
        return None
    same = (before.stage, before.version) == (seen.stage, seen.version)
    return before.settled_at if same and before.settled_at is not None else now


def still_well(before: ReplicaProgress, seen: ReplicaProgress) -> ReplicaProgress:
    """A canary after its hold: ``seen`` where it is done still, else failed with the reason."""
    if seen.stage is ReplicaStage.DONE and seen.boot_id == before.boot_id:
        return replace(before, version=seen.version)
    restarted = seen.stage is ReplicaStage.DONE
    reason = "it restarted in the hold" if restarted else f"it was {seen.stage.value} at the end of the hold"
    error = seen.error or TargetError(kind="unavailable", message=f"the canary fell ill: {reason}")
    version = before.version if seen.boot_id is None else seen.version
    return replace(before, stage=ReplicaStage.FAILED, version=version, error=error)


def outcome(replicas: Sequence[ReplicaProgress]) -> OperationEvent:
    """How an operation ends whose replicas stand like this."""
    done = sum(part.stage is ReplicaStage.DONE for part in replicas)
    if done == len(replicas):
        return OperationEvent.ALL_DONE
    return OperationEvent.SOME_DONE if done else OperationEvent.NONE_DONE
