"""The operation machine: one hot-load over a fleet, as a value. Values in, values out.

The rules:

1. An operation names one snapshot and ends in exactly one way; an ended one never changes again.
2. It ends when every replica has settled: with the version in place and verified, or with its own error.
3. A replica that doesn't answer by the deadline is ``unknown``: it may have the version or not.
4. One operation drives at a time. A newer one supersedes it, queued or running.
5. Cancelling ends the operation. What a replica has committed by then stays.
6. A pair that the table lacks is illegal: a ConflictError that names operation, state and event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from slackwater.errors import ConflictError
from slackwater.hotload.target import TargetError, TargetStatus
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
    """A newer operation, or following the head, took its place."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaProgress:
    """One replica's part of an operation."""

    replica: ReplicaId
    stage: ReplicaStage = ReplicaStage.PENDING
    version: Version | None = None
    """What it served when it was last heard."""
    error: TargetError | None = None

    @property
    def settled(self) -> bool:
        """Whether the operation is over for this replica."""
        return self.stage in (ReplicaStage.DONE, ReplicaStage.FAILED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One hot-load."""

    id: str
    idempotency_key: str
    run: RunId
    version: Version
    created_at: float
    """Seconds since the epoch, for people."""
    state: OperationState = OperationState.QUEUED
    replicas: tuple[ReplicaProgress, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether it never changes again."""
        return self.state in ENDED

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


def judge(version: Version, status: TargetStatus) -> ReplicaProgress:
    """How far a replica is towards ``version``, by what it says of itself."""

    def at(stage: ReplicaStage, error: TargetError | None = None) -> ReplicaProgress:
        return ReplicaProgress(replica=status.replica, stage=stage, version=status.version, error=error)

    if status.state in ("retired", "closed"):
        gone = TargetError(kind="unavailable", message=f"the replica is {status.state}: restart it")
        return at(ReplicaStage.FAILED, status.last_error or gone)
    if status.version == version and status.stage == "idle" and not status.provisional:
        return at(ReplicaStage.DONE)
    if status.waiting and status.target == version and status.last_error is not None:
        return at(ReplicaStage.FAILED, status.last_error)
    return at(ReplicaStage.UNDER_WAY)


def outcome(replicas: Sequence[ReplicaProgress]) -> OperationEvent:
    """How an operation ends whose replicas stand like this."""
    done = sum(part.stage is ReplicaStage.DONE for part in replicas)
    if done == len(replicas):
        return OperationEvent.ALL_DONE
    return OperationEvent.SOME_DONE if done else OperationEvent.NONE_DONE
